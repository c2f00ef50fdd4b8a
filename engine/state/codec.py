"""How keys and values are written down: a codec turns them into parts, and attends over parts. No storage is here.

A part is an array [1, Hkv, N, ..] with one entry per token on its third axis, so that any storage can append, cut and
copy it without knowing what it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx


class KvCodec(Protocol):
    """One way to write keys and values down."""

    @property
    def kind(self) -> str:
        """The name of the layout, as snapshots carry it."""

    @property
    def facts(self) -> Mapping[str, int | str]:
        """What else is needed to read the parts."""

    @property
    def part_names(self) -> Sequence[str]:
        """The parts, in order."""

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Parts of keys and values [1, Hkv, N, D]."""

    def decode(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values [1, Hkv, N, D] of `parts`, as exact as the parts are."""

    def attend(
        self, queries: mx.array, parts: Sequence[mx.array], *, scale: float, softcap: float, window: int
    ) -> mx.array:
        """Attend causally with `queries` [1, H, L, D], the newest L of the N tokens in `parts`.

        See `engine.ops.attention.causal_attention`. Returns [1, H, L, D].
        """
