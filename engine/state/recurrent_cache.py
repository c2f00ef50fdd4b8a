"""The state of one recurrent layer of one row: a matrix for each head, and the inputs that a convolution still reaches.

Its size does not grow with the tokens. It holds no positions, so it cannot be cut; only the token that was appended
last by itself can be taken back, for which the state before it is kept. Units: tokens and bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import mlx.core as mx

from engine.contracts.snapshot import LayerSnapshot
from engine.ops.copying import true_copy
from engine.state.snapshots import check_cut

if TYPE_CHECKING:
    from collections.abc import Sequence

RECURRENT = "recurrent"


class RecurrentCache:
    """See `engine.contracts.cache.RecurrentState`, which it is, and `engine.contracts.cache.Cache`."""

    __slots__ = ("_before", "_now", "_offset")

    def __init__(self) -> None:
        """Start without a token."""
        self._now: tuple[mx.array, ...] = ()
        self._before: tuple[mx.array, ...] | None = None
        self._offset = 0

    @property
    def offset(self) -> int:
        """Tokens read."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes held, the state before the last token included."""
        return sum(array.nbytes for array in (*self._now, *(self._before or ())))

    def read(self) -> tuple[mx.array, mx.array] | None:
        """See `engine.contracts.cache.RecurrentState.read`."""
        if not self._now:
            return None
        tail, matrices = self._now
        return tail, matrices

    def write(self, tail: mx.array, matrices: mx.array, *, tokens: int) -> None:
        """See `engine.contracts.cache.RecurrentState.write`."""
        self._before = self._now if tokens == 1 else None
        self._now = (tail, matrices)
        self._offset += tokens

    def append(self, keys: mx.array, values: mx.array) -> NoReturn:
        """A recurrent layer holds no keys, so this is never called."""
        raise NotImplementedError("a recurrent layer holds no keys")

    @property
    def is_seated(self) -> bool:
        """Never: the row attends by itself."""
        return False

    def place_for(self, tokens: int) -> None:
        """Nowhere: states are joined by the step itself."""

    def advance(self, tokens: int) -> None:
        """No table writes into this cache, so this is never called."""
        raise NotImplementedError(f"{tokens} tokens were written past a recurrent state")

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""
        return self._now

    def maintain(self) -> None:
        """Nothing to do."""

    @property
    def trimmable_tokens(self) -> int:
        """One, when it was appended last by itself: tokens cannot be told apart in the state."""
        return 0 if self._before is None else 1

    def trim(self, tokens: int) -> None:
        """Take back the one token that was appended last by itself.

        Raises:
            ValueError: more than that is asked for.
        """
        if tokens != 1 or self._before is None:
            raise ValueError(f"a recurrent state cannot forget {tokens} tokens")
        self._now, self._before = self._before, None
        self._offset -= 1

    def snapshot(self) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.snapshot`."""
        if not self._now:
            raise ValueError("a cache that holds no token has no snapshot")
        copies = dict(zip(("tail", "matrices"), map(true_copy, self._now), strict=True))
        mx.eval(copies)
        return LayerSnapshot(kind=RECURRENT, tokens=self._offset, least_tokens=self._offset, arrays=copies)

    def added_since(self, tokens: int) -> LayerSnapshot:  # noqa: ARG002 - the Protocol's parameter
        """The whole state: tokens cannot be told apart in it."""
        return self.snapshot()

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """See `engine.contracts.cache.Cache.restore`."""
        check_cut(snapshot, RECURRENT, tokens)
        self._now = (snapshot.arrays["tail"], snapshot.arrays["matrices"])
        self._before = None
        self._offset = tokens

    def close(self) -> None:
        """Release the arrays."""
        self._now, self._before = (), None
        self._offset = 0
