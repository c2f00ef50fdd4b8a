"""The plain KV cache: keys and values of one layer of one row, in the activations' dtype.

Storage grows by `GROWTH_TOKENS` at a time, so that most appends write in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.cache import capacity_for
from engine.ops.attention import causal_attention
from engine.state.plain_snapshot import plain_snapshot, read_plain_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.snapshot import LayerSnapshot


class KvCache:
    """Keys and values [1, Hkv, capacity, D]; the first `offset` positions are filled."""

    __slots__ = ("_composed", "_keys", "_offset", "_values", "_window")

    def __init__(self, *, window: int = 0, composed: bool = False) -> None:
        """`window` limits how far a query sees, in tokens; 0 means no limit. All positions are kept.

        `composed` makes attention avoid the library's exponential.
        """
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._offset = 0
        self._window = window
        self._composed = composed

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes reserved, padding included."""
        return sum(array.nbytes for array in self.arrays())

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, softcap: float = 0.0
    ) -> mx.array:
        """Append, then attend causally. See `engine.contracts.cache.Cache.attend`."""
        held_keys, held_values = self._append(keys, values)
        return causal_attention(
            queries,
            held_keys,
            held_values,
            scale=scale,
            softcap=softcap,
            window=self._window,
            composed=self._composed,
        )

    def place_for(self, tokens: int) -> None:
        """Nowhere: the row attends by itself."""

    def advance(self, tokens: int) -> None:
        """Count tokens; no table writes into this cache, so this is never called."""
        raise NotImplementedError(f"{tokens} tokens were written past a plain cache")

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, end = self._offset, self._offset + keys.shape[2]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            self._keys = _grown(self._keys, keys, start, end)
            self._values = _grown(self._values, values, start, end)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self._offset = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""
        return [] if self._keys is None or self._values is None else [self._keys, self._values]

    def is_trimmable(self) -> bool:
        """Always: positions past the offset are overwritten."""
        return True

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`."""
        self._offset -= min(tokens, self._offset)

    def snapshot(self) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.snapshot`."""
        if self._keys is None or self._values is None:
            raise ValueError("a cache that holds no token has no snapshot")
        return plain_snapshot(self._keys[:, :, : self._offset], self._values[:, :, : self._offset])

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """See `engine.contracts.cache.Cache.restore`."""
        keys, values = read_plain_snapshot(snapshot, tokens)
        self._keys, self._values = (_grown(held, held, tokens, tokens) for held in (keys, values))
        self._offset = tokens

    def close(self) -> None:
        """Release the arrays."""
        self._keys = self._values = None
        self._offset = 0


def _grown(held: mx.array | None, new: mx.array, start: int, end: int) -> mx.array:
    """Storage for at least `end` tokens whose first `start` positions are those of `held`."""
    room = mx.zeros((1, new.shape[1], capacity_for(end) - start, new.shape[3]), dtype=new.dtype)
    return room if held is None or start == 0 else mx.concatenate([held[:, :, :start], room], axis=2)
