"""The Protocol of one layer's state for one row (source name: one entry of `Cache[]`).

Units: `offset` counts tokens, `nbytes` bytes. A cache belongs to one row and to the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx


class Cache(Protocol):
    """Keys and values of one attention layer of one row."""

    @property
    def offset(self) -> int:
        """Tokens held."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved, padding included."""

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float) -> mx.array:
        """Append `keys`, `values` [1, Hkv, L, D] and attend with `queries` [1, H, L, D], causally.

        Returns [1, H, L, D].
        """

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""

    def is_trimmable(self) -> bool:
        """Whether `trim` can drop the newest tokens exactly."""

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`."""

    def close(self) -> None:
        """Release the arrays. The cache must not be used again."""
