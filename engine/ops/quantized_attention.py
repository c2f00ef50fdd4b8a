"""Attention of single queries over quantized keys and values, which are never unpacked."""

from __future__ import annotations

from typing import TypeAlias

import mlx.core as mx

from engine.ops.exponential import LOG2_E

Quantized: TypeAlias = tuple[mx.array, mx.array, mx.array]
"""Packed numbers, scales and biases, as `mx.quantize` makes them."""


def quantized_attention(
    queries: mx.array,
    keys: Quantized,
    values: Quantized,
    *,
    scale: float,
    softcap: float,
    group_size: int,
    bits: int,
    composed: bool,
) -> mx.array:
    """Attend with one query for each head; every key is seen.

    Args:
        queries: [1, H, 1, D].
        keys: [1, Hkv, N, D], quantized; H is a multiple of Hkv.
        values: as `keys`.
        scale: factor on the scores.
        softcap: bound that tanh puts on the scores; 0 means none.
        group_size: numbers that share a scale.
        bits: bits of a packed number.
        composed: avoid the library's exponential.

    Returns:
        [1, H, 1, D].
    """
    heads, dim = queries.shape[1], queries.shape[3]
    packed, scales, biases = keys
    grouped = (queries * scale).reshape(1, packed.shape[1], -1, dim)
    scores = mx.quantized_matmul(grouped, packed, scales, biases, transpose=True, group_size=group_size, bits=bits)
    if softcap:
        scores = mx.tanh(scores / softcap) * softcap
    if composed:
        powers = mx.power(2.0, (scores - mx.max(scores, axis=-1, keepdims=True)) * LOG2_E)
        weights = powers / mx.sum(powers, axis=-1, keepdims=True)
    else:
        weights = mx.softmax(scores, axis=-1, precise=True)
    packed, scales, biases = values
    mixed = mx.quantized_matmul(weights, packed, scales, biases, transpose=False, group_size=group_size, bits=bits)
    return mixed.reshape(1, heads, 1, dim)
