"""Attention: one row's causal attention, and the packed form that gives each segment its own cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.cache import TableMember
from engine.ops.exponential import attention_of_powers, query_factor
from engine.ops.host_attention import HostAttention
from engine.ops.streams import in_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import CacheTable, HeldKeys, TablePlace, TableStep
    from engine.contracts.graph import PackedSegment
    from engine.runtime.host_kernels import HostKernels


def causal_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    composed: bool = False,
) -> mx.array:
    """Attend causally; the queries are the newest positions of the keys.

    Args:
        queries: [1, H, L, D].
        keys: [1, Hkv, N, D] with N ≥ L; position N-1 belongs to query L-1.
        values: [1, Hkv, N, D].
        scale: factor on the scores, usually D ** -0.5.
        softcap: bound that tanh puts on the scores; 0 means none.
        window: positions that a query sees, itself included; 0 means all.
        composed: avoid the library's exponential.

    Returns:
        [1, H, L, D].

    Source: Vaswani et al. 2017, section 3.2.1; Beltagy et al. 2020 (sliding window); Gemma 2 report, section 2 (cap).
    """
    length, held = queries.shape[2], keys.shape[2]
    if window and held > window + length - 1:
        keys, values = keys[:, :, -(window + length - 1) :], values[:, :, -(window + length - 1) :]
        held = window + length - 1
    if composed:
        visible = None if length == 1 else visible_keys(length, held, window)
        return attention_of_powers(queries, keys, values, scale=scale, softcap=softcap, visible=visible)
    if softcap:
        return _capped_attention(queries, keys, values, scale, softcap, window)
    mask: mx.array | str | None = None
    if length > 1:
        mask = _window_mask(length, held, window) if window and held > window else "causal"
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _capped_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, softcap: float, window: int
) -> mx.array:
    """The library has no kernel for bounded scores, so each operation stands by itself."""
    length, held = queries.shape[2], keys.shape[2]
    grouped = (queries * scale).reshape(1, keys.shape[1], -1, length, queries.shape[3])
    scores = mx.tanh((grouped @ keys[:, :, None].swapaxes(-1, -2)) / softcap) * softcap
    if length > 1:
        scores = mx.where(_window_mask(length, held, window or held), scores, mx.finfo(scores.dtype).min)
    return (mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]).reshape(queries.shape)


def masked_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, *, scale: float, composed: bool = False
) -> mx.array:
    """Attend to the keys that `mask` [L, N] of booleans shows to each query, which are one at least.

    Args:
        queries: [1, H, L, D].
        keys: [1, Hkv, N, D].
        values: [1, Hkv, N, D].
        mask: true where a query sees a key.
        scale: factor on the scores.
        composed: avoid the library's exponential.

    Returns:
        [1, H, L, D].

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if composed:
        visible = mx.where(mask, 0.0, -mx.inf)
        return attention_of_powers(queries, keys, values, scale=scale, visible=visible)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def mask_with_stretches(length: int, held: int, window: int, stretches: Sequence[tuple[int, int]]) -> mx.array:
    """What the newest `length` of `held` positions see, [L, N] of booleans.

    Each sees `window` positions up to itself (0: all of them), and those in one of `stretches` see all of that stretch,
    whichever comes first and however far. A stretch is its start and its end among the newest positions.
    """
    owners = [-1] * length
    for number, (start, end) in enumerate(stretches):
        owners[start:end] = [number] * (end - start)
    owner = mx.array(owners, dtype=mx.int32)
    together = (owner[:, None] == owner[None, :]) & (owner[:, None] >= 0)
    before = mx.zeros((length, held - length), dtype=mx.bool_)
    return _window_mask(length, held, window or held) | mx.concatenate([before, together], axis=1)


def open_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, composed: bool = False
) -> mx.array:
    """Attend to every key.

    Args:
        queries: [1, H, L, D].
        keys: [1, Hkv, N, D].
        values: [1, Hkv, N, D].
        scale: factor on the scores.
        composed: avoid the library's exponential.

    Returns:
        [1, H, L, D].

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if composed:
        return attention_of_powers(queries, keys, values, scale=scale, visible=None)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)


def visible_keys(length: int, held: int, window: int = 0) -> mx.array:
    """What is added to the scores of the newest `length` of `held` positions: [L, N], 0 where a key is seen, else -inf.

    `window` counts the positions that a query sees, itself included; 0 means all.
    """
    return mx.where(_window_mask(length, held, window or held), 0.0, -mx.inf)


def _window_mask(length: int, held: int, window: int) -> mx.array:
    """Boolean [L, N]: query i sees keys in (i - window, i]."""
    queries = mx.arange(held - length, held)[:, None]
    keys = mx.arange(held)[None, :]
    return (keys <= queries) & (keys > queries - window)


class PackedAttention:
    """The attention of one packed step: each row against its own keys and values, rows of one table together.

    Planned once; every layer calls it. No row's arithmetic sees another's numbers.
    """

    __slots__ = ("_kept", "_kernels", "_plans", "_scale", "_segments", "_softcap", "_starts")

    def __init__(
        self,
        segments: Sequence[PackedSegment],
        *,
        scale: float,
        softcap: float = 0.0,
        kernels: HostKernels | None = None,
    ) -> None:
        """`segments` are the rows' stretches in packed order; scores get the factor `scale` and the bound `softcap`.

        Rows of tables attend by `kernels` where these can.
        """
        self._segments = segments
        self._kernels = kernels
        self._scale = scale
        self._softcap = softcap
        self._starts = [0, *accumulate(segment.length for segment in segments)][:-1]
        self._plans: dict[tuple[CacheTable | None, ...], _LayerPlan] = {}
        self._kept: dict[int, _Appended] = {}

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, layer: int, kept: bool = False
    ) -> mx.array:
        """Append and attend in one layer.

        Args:
            queries: [T, H, 1, D] for T packed tokens.
            keys: [T, Hkv, 1, D].
            values: [T, Hkv, 1, D].
            layer: index into each segment's caches.
            kept: whether layers that follow attend to the same keys and values, through `again`.

        Returns:
            [1, T, H·D].
        """
        plan = self._plan(layer)
        held = [self._appended(index, keys, values, layer) for index in plan.alone]
        joined = mx.concatenate([keys, values], axis=1) if plan.steps else None
        mixed = self._attended(queries, joined, _Appended(plan, held), layer)
        for index in plan.seated:
            self._segments[index].caches[layer].advance(self._segments[index].length)
        if kept:
            self._kept[layer] = _Appended(plan, held)
        return mixed

    def again(self, queries: mx.array, *, layer: int) -> mx.array:
        """Attend with `queries` [T, H, 1, D] to what `layer` has appended and kept in this step: [1, T, H·D]."""
        return self._attended(queries, None, self._kept[layer], layer)

    def _attended(self, queries: mx.array, joined: mx.array | None, appended: _Appended, layer: int) -> mx.array:
        plan, parts = appended.plan, []
        if plan.host is not None and plan.host.can_attend(queries.shape[3]):
            return plan.host(queries, joined, layer=layer, factor=query_factor(self._scale))[None]
        if plan.steps:
            multiplied = queries * query_factor(self._scale, self._softcap)  # once for all tables
            for step in plan.steps:
                parts += step.attend(multiplied, joined, layer=layer, softcap=self._softcap)
        outputs = in_turns(parts)
        for index, held in zip(plan.alone, appended.held, strict=True):
            attended = held.attend(self._stretch(index, queries), scale=self._scale, softcap=self._softcap)
            outputs.append(attended[0].swapaxes(0, 1).flatten(1))
        mixed = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)
        return (mixed if plan.unsorted is None else mixed[plan.unsorted])[None]

    def _appended(self, index: int, keys: mx.array, values: mx.array, layer: int) -> HeldKeys:
        cache = self._segments[index].caches[layer]
        return cache.append(self._stretch(index, keys), self._stretch(index, values))

    def _stretch(self, index: int, packed: mx.array) -> mx.array:
        """One row's part of a packed array [T, H, 1, D], as [1, H, L, D]."""
        start = self._starts[index]
        return packed[start : start + self._segments[index].length].transpose(2, 1, 0, 3)

    def _plan(self, layer: int) -> _LayerPlan:
        places = [segment.caches[layer].place_for(segment.length) for segment in self._segments]
        key = tuple(None if place is None else place.table for place in places)
        if key not in self._plans:
            self._plans[key] = self._planned(places, layer)
        return self._plans[key]

    def _planned(self, places: Sequence[TablePlace | None], layer: int) -> _LayerPlan:
        tables: dict[CacheTable, list[TableMember]] = {}
        alone, seated = [], []
        for index, (segment, start, place) in enumerate(zip(self._segments, self._starts, places, strict=True)):
            if place is None:
                alone.append(index)
                continue
            seated.append(index)
            tables.setdefault(place.table, []).extend(_members(segment, place.slot, start, layer))
        steps = [table.plan(members) for table, members in tables.items()]
        order = [token for step in steps for token in step.order]
        for index in alone:
            order += range(self._starts[index], self._starts[index] + self._segments[index].length)
        on_host = self._kernels is not None and not alone and not self._softcap
        host = HostAttention(self._kernels, steps) if self._kernels is not None and on_host else None
        return _LayerPlan(steps=steps, alone=alone, seated=seated, unsorted=_inverse(order), host=host)


def _members(segment: PackedSegment, slot: int, start: int, layer: int) -> list[TableMember]:
    """The stretches in which `segment`, which is seated at `slot` and packed at `start`, attends."""
    offset, before = segment.caches[layer].offset, segment.length - 1
    if not segment.ends_alone:
        return [TableMember(slot, start, segment.length, offset)]
    return [TableMember(slot, start, before, offset), TableMember(slot, start + before, 1, offset + before)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPlan:
    """Steps of tables, segments that attend by themselves or sit in a table, and where each packed token ends up.

    `host` attends for all of them at once.
    """

    steps: list[TableStep]
    alone: list[int]
    seated: list[int]
    unsorted: mx.array | None
    host: HostAttention | None


@dataclass(frozen=True, slots=True)
class _Appended:
    """How one layer's tokens were appended, and what those of segments by themselves see, in the plan's order."""

    plan: _LayerPlan
    held: Sequence[HeldKeys]


def _inverse(order: list[int]) -> mx.array | None:
    """Indices that bring tokens listed in `order` back into packed order; None when they are."""
    if order == sorted(order):
        return None
    return mx.array(sorted(range(len(order)), key=order.__getitem__), dtype=mx.int32)
