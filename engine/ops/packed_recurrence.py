"""The recurrent part of one packed step: a causal convolution and the gated delta rule, each row from its own state.

Rows whose stretches have one length go together; nothing of one enters another's arithmetic. T counts packed tokens.
Source: Yang et al. 2024, "Gated Delta Networks", section 3.4 (the block around the rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine.ops.gated_delta import DeltaInputs, gated_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import RecurrentState
    from engine.contracts.graph import PackedSegment, RecurrentGeometry

KEY_EPSILON = 1e-6
"""Added to the square of a key's or query's length before it is divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentTokens:
    """What the packed tokens bring to one layer; H counts value heads.

    channels: [T, C], queries, keys and values before the convolution.
    log_decays: [T, H] float32.
    strengths: [T, H].
    """

    channels: mx.array
    log_decays: mx.array
    strengths: mx.array


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with stretches of one length; `tokens` are their packed tokens in order, None for all of the step's."""

    rows: list[int]
    length: int
    tokens: mx.array | None


class PackedRecurrence:
    """Planned once for a step; every recurrent layer calls it."""

    __slots__ = ("_geometry", "_groups", "_segments", "_unsorted")

    def __init__(self, segments: Sequence[PackedSegment], geometry: RecurrentGeometry) -> None:
        """`segments` are the rows' stretches in packed order."""
        self._segments = segments
        self._geometry = geometry
        self._groups, self._unsorted = _planned([segment.length for segment in segments])

    def __call__(self, tokens: RecurrentTokens, kernel: mx.array, *, layer: int) -> mx.array:
        """Read and update every row's state of one layer.

        Args:
            tokens: of the whole step.
            kernel: [K, C], the convolution's weights, the newest token's last.
            layer: index into each segment's caches.

        Returns:
            [T, H, Dv].
        """
        parts = [self._group(group, tokens, kernel, layer) for group in self._groups]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return joined if self._unsorted is None else joined[self._unsorted]

    def _group(self, group: _Group, tokens: RecurrentTokens, kernel: mx.array, layer: int) -> mx.array:
        caches = [cast("RecurrentState", self._segments[row].caches[layer]) for row in group.rows]
        channels, log_decays, strengths = (
            (part if group.tokens is None else part[group.tokens]).reshape(len(caches), group.length, -1)
            for part in (tokens.channels, tokens.log_decays, tokens.strengths)
        )
        tails, matrices = _joined([self._state(cache, channels.dtype) for cache in caches])
        seen = mx.concatenate([tails, channels], axis=1)
        inputs = self._inputs(causal_convolution(seen, kernel), log_decays, strengths)
        read, matrices = gated_delta(inputs, matrices)
        kept = seen[:, group.length :]
        for row, cache in enumerate(caches):
            cache.write(kept[row : row + 1], matrices[row : row + 1], tokens=group.length)
        return read.astype(channels.dtype).reshape(-1, *read.shape[2:])

    def _state(self, cache: RecurrentState, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        sizes = self._geometry
        return cache.read() or (
            mx.zeros((1, sizes.convolution_tokens - 1, sizes.channels), dtype=dtype),
            mx.zeros((1, sizes.value_heads, sizes.value_dim, sizes.key_dim), dtype=mx.float32),
        )

    def _inputs(self, mixed: mx.array, log_decays: mx.array, strengths: mx.array) -> DeltaInputs:
        """Split the convolution's [R, L, C] into heads; queries and keys become unit vectors, queries also scaled."""
        sizes = self._geometry
        width = sizes.key_heads * sizes.key_dim
        rows, length, _ = mixed.shape
        active = (mixed * mx.sigmoid(mixed)).astype(mx.float32)
        queries, keys, values = mx.split(active, [width, 2 * width], axis=-1)
        shared = sizes.value_heads // sizes.key_heads
        queries, keys = (
            mx.repeat(_unit(part.reshape(rows, length, sizes.key_heads, sizes.key_dim)), shared, axis=2)
            for part in (queries, keys)
        )
        return DeltaInputs(
            queries * sizes.key_dim**-0.5,
            keys,
            values.reshape(rows, length, sizes.value_heads, sizes.value_dim),
            log_decays.astype(mx.float32),
            strengths.astype(mx.float32),
        )


def causal_convolution(seen: mx.array, kernel: mx.array) -> mx.array:
    """Convolve each channel with its own weights over the newest K positions.

    Args:
        seen: [R, K-1+L, C].
        kernel: [K, C], the newest position's weights last.

    Returns:
        [R, L, C] for the last L positions.
    """
    width = kernel.shape[0]
    length = seen.shape[1] - width + 1
    total = seen[:, :length] * kernel[0]
    for place in range(1, width):
        total = total + seen[:, place : place + length] * kernel[place]
    return total


def _unit(x: mx.array) -> mx.array:
    """Vectors of length one along the last axis."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + KEY_EPSILON)


def _joined(states: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    if len(states) == 1:
        return states[0]
    tails, matrices = zip(*states, strict=True)
    return mx.concatenate(list(tails), axis=0), mx.concatenate(list(matrices), axis=0)


def _planned(lengths: Sequence[int]) -> tuple[list[_Group], mx.array | None]:
    """Rows grouped by length, and the indices that bring the groups' tokens back into packed order, if they are not."""
    starts = [0, *accumulate(lengths)]
    members: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        members.setdefault(length, []).append(row)
    if len(members) == 1:
        return [_Group(rows, length, None) for length, rows in members.items()], None
    orders = [[starts[row] + place for row in rows for place in range(length)] for length, rows in members.items()]
    groups = [
        _Group(rows, length, mx.array(order, dtype=mx.int32))
        for (length, rows), order in zip(members.items(), orders, strict=True)
    ]
    joined = [token for order in orders for token in order]
    return groups, mx.array(sorted(range(len(joined)), key=joined.__getitem__), dtype=mx.int32)
