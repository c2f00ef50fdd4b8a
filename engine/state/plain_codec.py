"""Keys and values as they are, in the activations' dtype."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.ops.attention import causal_attention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx

PLAIN = "plain"
PLAIN_PARTS = ("keys", "values")


class PlainCodec:
    """See `engine.state.codec.KvCodec`."""

    kind = PLAIN
    part_names = PLAIN_PARTS
    facts: Mapping[str, int | str] = MappingProxyType({})

    def __init__(self, *, composed: bool = False) -> None:
        """`composed` makes attention avoid the library's exponential."""
        self._composed = composed

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Nothing to do."""
        return [keys, values]

    def decode(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Nothing to do."""
        keys, values = parts
        return keys, values

    def attend(
        self, queries: mx.array, parts: Sequence[mx.array], *, scale: float, softcap: float, window: int
    ) -> mx.array:
        """Attend over keys and values as they are."""
        keys, values = parts
        return causal_attention(
            queries, keys, values, scale=scale, softcap=softcap, window=window, composed=self._composed
        )
