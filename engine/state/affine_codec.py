"""Keys and values quantized to a few bits, with a scale and a bias for each group of numbers.

One query attends over the packed numbers; a chunk of a prompt unpacks them first, which costs less than a product of
packed numbers for each of its queries.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.attention import causal_attention
from engine.ops.quantized_attention import Quantized, quantized_attention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class AffineCodec:
    """See `engine.state.codec.KvCodec`. Numbers are (packed · scale + bias). Source: mlx.core.quantize."""

    kind = "affine"
    part_names = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")

    def __init__(self, *, bits: int, group_size: int, composed: bool = False) -> None:
        """`composed` makes attention avoid the library's exponential."""
        self._bits = bits
        self._group_size = group_size
        self._composed = composed
        self.facts: Mapping[str, int | str] = MappingProxyType({"bits": bits, "group_size": group_size})

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Quantize keys and values [1, Hkv, N, D]."""
        return [*self._quantized(keys), *self._quantized(values)]

    def decode(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values in the dtype of the scales."""
        keys, values = (self._unpacked(*three) for three in _halves(parts))
        return keys, values

    def attend(
        self, queries: mx.array, parts: Sequence[mx.array], *, scale: float, softcap: float, window: int
    ) -> mx.array:
        """See `engine.state.codec.KvCodec.attend`."""
        if queries.shape[2] == 1:
            return quantized_attention(
                queries,
                *_halves(parts),
                scale=scale,
                softcap=softcap,
                group_size=self._group_size,
                bits=self._bits,
                composed=self._composed,
            )
        return causal_attention(
            queries, *self.decode(parts), scale=scale, softcap=softcap, window=window, composed=self._composed
        )

    def _quantized(self, dense: mx.array) -> Sequence[mx.array]:
        return list(mx.quantize(dense, group_size=self._group_size, bits=self._bits))

    def _unpacked(self, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(packed, scales, biases, group_size=self._group_size, bits=self._bits)


def _halves(parts: Sequence[mx.array]) -> tuple[Quantized, Quantized]:
    keys, key_scales, key_biases, values, value_scales, value_biases = parts
    return (keys, key_scales, key_biases), (values, value_scales, value_biases)
