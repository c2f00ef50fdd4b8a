"""Attention: one row's causal attention, and the packed form that gives each segment its own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.exponential import attention_of_powers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.graph import PackedSegment


def causal_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, window: int = 0, composed: bool = False
) -> mx.array:
    """Attend causally; the queries are the newest positions of the keys.

    Args:
        queries: [1, H, L, D].
        keys: [1, Hkv, N, D] with N ≥ L; position N-1 belongs to query L-1.
        values: [1, Hkv, N, D].
        scale: factor on the scores, usually D ** -0.5.
        window: positions that a query sees, itself included; 0 means all.
        composed: avoid the library's exponential.

    Returns:
        [1, H, L, D].

    Source: Vaswani et al. 2017, section 3.2.1; Beltagy et al. 2020 (sliding window).
    """
    length, held = queries.shape[2], keys.shape[2]
    if window and held > window + length - 1:
        keys, values = keys[:, :, -(window + length - 1) :], values[:, :, -(window + length - 1) :]
        held = window + length - 1
    if composed:
        visible = None if length == 1 else mx.where(_window_mask(length, held, window or held), 0.0, -mx.inf)
        return attention_of_powers(queries, keys, values, scale=scale, visible=visible)
    mask: mx.array | str | None = None
    if length > 1:
        mask = _window_mask(length, held, window) if window and held > window else "causal"
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _window_mask(length: int, held: int, window: int) -> mx.array:
    """Boolean [L, N]: query i sees keys in (i - window, i]."""
    queries = mx.arange(held - length, held)[:, None]
    keys = mx.arange(held)[None, :]
    return (keys <= queries) & (keys > queries - window)


def packed_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    segments: Sequence[PackedSegment],
    *,
    layer: int,
    scale: float,
) -> mx.array:
    """Attend per segment, each against the cache of its own row, so that no row's arithmetic sees another's.

    Args:
        queries: [T, H, 1, D] for T packed tokens.
        keys: [T, Hkv, 1, D].
        values: [T, Hkv, 1, D].
        segments: the rows' stretches, in packed order; lengths sum to T.
        layer: index into each segment's caches.
        scale: factor on the scores.

    Returns:
        [1, T, H·D].
    """
    bounds, end = [], 0
    for segment in segments[:-1]:
        end += segment.length
        bounds.append(end)
    outputs = []
    for segment, q, k, v in zip(
        segments, _split(queries, bounds), _split(keys, bounds), _split(values, bounds), strict=True
    ):
        if segment.length > 1:
            q, k, v = (part.transpose(2, 1, 0, 3) for part in (q, k, v))
        out = segment.caches[layer].attend(q, k, v, scale=scale)
        outputs.append(out.transpose(0, 2, 1, 3).reshape(1, segment.length, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _split(packed: mx.array, bounds: list[int]) -> list[mx.array]:
    return list(mx.split(packed, bounds, axis=0)) if bounds else [packed]
