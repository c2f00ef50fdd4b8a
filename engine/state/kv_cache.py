"""Keys and values of one layer of one row that attends by itself: any codec, any window, in storage of its own.

Storage grows by `GROWTH_TOKENS` at a time, so that most appends write in place. A sliding layer keeps what its window
can still see and a few tokens more, always in temporal order: when its storage is full the newest tokens move to the
front, once in `SLACK_TOKENS` appends, so that attention is the same arithmetic as over all positions. (A ring would
save the move and cost the order of summation.) Units: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.cache import capacity_for, window_capacity
from engine.state.held_keys import CodedKeys
from engine.state.plain_codec import PlainCodec
from engine.state.snapshots import check_snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.contracts.snapshot import LayerSnapshot
    from engine.state.codec import KvCodec


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a cache turns into between steps, once it holds `start` tokens, and one at least."""

    codec: KvCodec
    start: int


class KvCache:
    """Parts [1, Hkv, capacity, ..] whose first entries are the tokens from `_first` up to `offset`."""

    __slots__ = ("_codec", "_conversion", "_first", "_least", "_offset", "_parts", "_window")

    def __init__(self, codec: KvCodec | None = None, *, window: int = 0, conversion: Conversion | None = None) -> None:
        """Start empty.

        Args:
            codec: how keys and values are written down; None keeps them plain.
            window: how far a query sees, itself included, in tokens; 0 means no limit.
            conversion: what `maintain` turns the cache into, and when.
        """
        self._codec = codec or PlainCodec()
        self._window = window
        self._conversion = conversion
        self._parts: list[mx.array] = []
        self._first = 0
        self._offset = 0
        self._least = 0

    @property
    def offset(self) -> int:
        """Tokens held, those out of the window's sight included."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes reserved, padding included."""
        return sum(part.nbytes for part in self._parts)

    @property
    def trimmable_tokens(self) -> int:
        """How many of the newest tokens `trim` can take back: all, until a window has let go of older ones."""
        if not self._first:
            return self._offset
        return max(0, self._offset - (self._window - 1) - self._first)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, softcap: float = 0.0
    ) -> mx.array:
        """Append `keys`, `values` [1, Hkv, L, D], then attend with `queries` [1, H, L, D], causally."""
        return self.append(keys, values).attend(queries, scale=scale, softcap=softcap)

    def append(self, keys: mx.array, values: mx.array) -> CodedKeys:
        """See `engine.contracts.cache.Cache.append`."""
        held = CodedKeys(self._codec, self._append(self._codec.encode(keys, values)), self._window)
        if self._window and self._capacity > window_capacity(self._window):
            self._move(min(self._held, self._window - 1), 0)
        return held

    @property
    def is_seated(self) -> bool:
        """Never: the row attends by itself."""
        return False

    def place_for(self, tokens: int) -> None:
        """Nowhere: the row attends by itself."""

    def advance(self, tokens: int) -> None:
        """Count tokens; no table writes into this cache, so this is never called."""
        raise NotImplementedError(f"{tokens} tokens were written past a cache that shares no table")

    def maintain(self) -> None:
        """Convert what is held when that is due, and wait for it: one layer's transient at a time."""
        conversion = self._conversion
        if conversion is None or not self._offset or self._offset < conversion.start:
            return
        self._conversion = None
        self._parts = conversion.codec.encode(*self._codec.decode(self._parts))
        self._codec = conversion.codec
        self._least = self._offset if conversion.start else 0
        mx.eval(self._parts)
        mx.clear_cache()

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""
        return self._parts

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`. See `engine.contracts.cache.Cache.trim`."""
        tokens = min(tokens, self._offset)
        if tokens > self.trimmable_tokens:
            raise ValueError(f"{tokens} tokens cannot be taken back from a window of {self._window} that has moved on")
        self._offset -= tokens

    def snapshot(self) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.snapshot`."""
        kept = min(self._held, self._window - 1) if self._first else self._held
        parts = [part[:, :, self._held - kept : self._held] for part in self._parts]
        least = self._offset if self._first else min(self._least, self._offset)
        return take_snapshot(self._codec, parts, tokens=self._offset, least_tokens=least, facts=self._window_facts)

    def added_since(self, tokens: int) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.added_since`."""
        if self._first or not max(1, self._least) <= tokens < self._offset:
            return self.snapshot()
        parts = [part[:, :, tokens : self._offset] for part in self._parts]
        return take_snapshot(
            self._codec,
            parts,
            start=tokens,
            tokens=self._offset,
            least_tokens=min(self._least, self._offset),
            facts=self._window_facts,
        )

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """See `engine.contracts.cache.Cache.restore`."""
        if self._conversion is not None and snapshot.kind == self._conversion.codec.kind:
            self._codec, self._conversion = self._conversion.codec, None
        check_snapshot(snapshot, self._codec, tokens, self._window_facts)
        self._parts = [snapshot.arrays[name] for name in self._codec.part_names]
        self._first = snapshot.tokens - self._parts[0].shape[2]
        self._offset = tokens
        self._least = snapshot.least_tokens
        self._move(self._held, 0)

    def close(self) -> None:
        """Release the arrays."""
        self._parts = []
        self._first = self._offset = 0

    @property
    def _held(self) -> int:
        return self._offset - self._first

    @property
    def _capacity(self) -> int:
        return self._parts[0].shape[2] if self._parts else 0

    @property
    def _window_facts(self) -> Mapping[str, int | str]:
        return {"window": self._window} if self._window else {}

    def _append(self, added: Sequence[mx.array]) -> list[mx.array]:
        """Write the parts of new tokens; returns the parts of all tokens that they can see."""
        length = added[0].shape[2]
        if not self._parts:
            self._parts = [part[:, :, :0] for part in added]
        if self._held + length > self._capacity:
            fits = not self._window or self._held + length <= window_capacity(self._window)
            self._move(self._held if fits else min(self._held, self._window - 1), length)
        start = self._held
        for held, new in zip(self._parts, added, strict=True):
            held[:, :, start : start + length] = new
        self._offset += length
        seen = min(self._held, self._window + length - 1) if self._window else self._held
        return [part[:, :, self._held - seen : self._held] for part in self._parts]

    def _move(self, kept: int, added: int) -> None:
        """Give the newest `kept` tokens storage of their own, with room for `added`; the others are let go."""
        start, end = self._held - kept, self._held
        self._first += start
        capacity = capacity_for(kept + added)
        if self._window:
            most = window_capacity(self._window)
            capacity = max(most if self._first else min(capacity, most), kept + added)
        self._parts = [_moved(part, start, end, capacity) for part in self._parts]


def _moved(part: mx.array, start: int, end: int, capacity: int) -> mx.array:
    room = mx.zeros((*part.shape[:2], capacity - (end - start), *part.shape[3:]), dtype=part.dtype)
    return room if start == end else mx.concatenate([part[:, :, start:end], room], axis=2)
