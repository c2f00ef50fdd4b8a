"""TurboQuant: affine keys, and values that are rotated until their numbers look normal, then rounded to fixed levels.

Both are cut into groups of 32 numbers along the head. Attention mixes values where they are, in the rotated space, and
turns only its result back. Source: reference, autoregressive §4.3; Zandieh et al. 2025, "TurboQuant".
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.kv_scheme import TURBO_GROUP_SIZE
from engine.ops.attention import causal_attention
from engine.ops.bit_packing import pack, unpack
from engine.ops.lloyd_max import normal_levels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIGN_KEY = 42
TINY = 1e-8
MOST_COUNTED_BOUNDARIES = 31
"""Up to so many boundaries it is faster to count those below a number than to search."""
LARGEST_ZERO = 2047
"""Zeros are kept as float16, which counts exactly up to 2048."""


class TurboCodec:
    """See `engine.state.codec.KvCodec`."""

    kind = "turbo"
    part_names = ("keys", "key_scales", "key_zeros", "values", "value_scales")

    def __init__(self, *, key_bits: int, value_bits: int, composed: bool = False) -> None:
        """`composed` makes attention avoid the library's exponential."""
        self._key_bits = key_bits
        self._value_bits = value_bits
        self._composed = composed
        levels, boundaries = normal_levels(value_bits)
        self._levels = mx.array(levels, dtype=mx.float32)
        self._boundaries = mx.array(boundaries, dtype=mx.float32)
        self._signs: mx.array | None = None
        self.facts: Mapping[str, int | str] = MappingProxyType({"key_bits": key_bits, "value_bits": value_bits})

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Quantize keys and values [1, Hkv, N, D]; D is a power of two, 64 at least."""
        return [*self._encoded_keys(_grouped(keys)), *self._encoded_values(_grouped(self._rotated(values)))]

    def decode(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values in float32."""
        keys, rotated = self._decoded(parts)
        return keys, self._turned_back(rotated)

    def attend(
        self, queries: mx.array, parts: Sequence[mx.array], *, scale: float, softcap: float, window: int
    ) -> mx.array:
        """See `engine.state.codec.KvCodec.attend`."""
        keys, rotated = (part.astype(queries.dtype) for part in self._decoded(parts))
        mixed = causal_attention(
            queries, keys, rotated, scale=scale, softcap=softcap, window=window, composed=self._composed
        )
        return self._turned_back(mixed).astype(queries.dtype)

    def _encoded_keys(self, groups: mx.array) -> list[mx.array]:
        least, most = mx.min(groups, axis=-1, keepdims=True), mx.max(groups, axis=-1, keepdims=True)
        steps = 2**self._key_bits - (2 if self._is_signed else 1)
        # A group that hardly varies would need a zero that no float16 holds; a wider step keeps it as exact as those.
        peak = mx.maximum(mx.abs(least), mx.abs(most))
        scale = mx.maximum((most - least) / steps, peak / LARGEST_ZERO)
        origin = (least + most) / 2 if self._is_signed else least
        zero = mx.round(origin / (scale + TINY))
        lowest = -(steps // 2) if self._is_signed else 0
        number = mx.clip(mx.round(groups / (scale + TINY) - zero), lowest, lowest + steps)
        stored = (number + self._middle).astype(mx.uint32).flatten(-2)
        return [pack(stored, self._key_bits), *(part[..., 0].astype(mx.float16) for part in (scale, zero))]

    def _encoded_values(self, groups: mx.array) -> list[mx.array]:
        spread = mx.sqrt(mx.mean(mx.square(groups), axis=-1, keepdims=True))
        numbers = self._bucket(groups / (spread + TINY)).flatten(-2)
        return [pack(numbers, self._value_bits), spread[..., 0].astype(mx.float16)]

    def _bucket(self, x: mx.array) -> mx.array:
        """How many boundaries lie below each number."""
        if len(self._boundaries) <= MOST_COUNTED_BOUNDARIES:
            return mx.sum(x[..., None] > self._boundaries, axis=-1).astype(mx.uint32)
        found = mx.zeros(x.shape, dtype=mx.uint32)
        for bit in reversed(range(self._value_bits)):
            higher = found + 2**bit
            found = mx.where(x > self._boundaries[higher - 1], higher, found)
        return found

    def _decoded(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys, and values in the rotated space."""
        # Cut from storage they are in stretches, over which elementwise operations are several times slower.
        words, scales, zeros, value_words, spreads = map(mx.contiguous, parts)
        numbers = unpack(words, self._key_bits).astype(mx.float32)
        keys = (_grouped(numbers) + (zeros[..., None].astype(mx.float32) - self._middle)) * scales[..., None]
        levels = self._levels[unpack(value_words, self._value_bits)]
        return keys.flatten(-2), (_grouped(levels) * spreads[..., None]).flatten(-2)

    def _rotated(self, values: mx.array) -> mx.array:
        return mx.hadamard_transform(values.astype(mx.float32) * self._fixed_signs(values.shape[-1]))

    def _turned_back(self, rotated: mx.array) -> mx.array:
        return mx.hadamard_transform(rotated.astype(mx.float32)) * self._fixed_signs(rotated.shape[-1])

    def _fixed_signs(self, dim: int) -> mx.array:
        """Drawn once: all heads of a layer have one size."""
        if self._signs is None or len(self._signs) != dim:
            self._signs = mx.random.randint(0, 2, (dim,), key=mx.random.key(SIGN_KEY)).astype(mx.float32) * 2 - 1
            mx.eval(self._signs)
        return self._signs

    @property
    def _is_signed(self) -> bool:
        return self._key_bits == 8

    @property
    def _middle(self) -> int:
        """What is added to a signed number so that it can be packed."""
        return 128 if self._is_signed else 0


def _grouped(x: mx.array) -> mx.array:
    return x.astype(mx.float32).reshape(*x.shape[:-1], -1, TURBO_GROUP_SIZE)
