"""The autoregressive method: one packed forward over every row's next unit, then one draw for each row due.

There is no second loop: a single request is a step with one row. Runs on the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine.contracts.graph import PackedSegment
from engine.sampling.sampler import Draw, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
    from engine.generation.row import Row, RowUnit


def run_packed_step(binding: MlxAutoregressiveBinding, rows: Sequence[Row]) -> list[int | None]:
    """Advance `rows` by one unit each.

    Returns:
        For each row the token sampled for it, or None while its prompt is still being prefilled.
    """
    units = [row.next_unit() for row in rows]
    tokens = mx.array([[token for unit in units for token in unit.tokens]], dtype=mx.uint32)
    segments = [PackedSegment(len(unit.tokens), row.caches) for row, unit in zip(rows, units, strict=True)]
    hidden = binding.hidden(tokens, segments)
    sampled = _sampled(binding, hidden, rows, units)
    mx.eval(sampled, [cache.arrays() for row in rows for cache in row.caches])
    for row, unit in zip(rows, units, strict=True):
        row.settle(unit)
    drawn = iter(cast("list[int]", sampled.tolist()) if sampled is not None else [])
    return [next(drawn) if unit.samples else None for unit in units]


def _sampled(
    binding: MlxAutoregressiveBinding, hidden: mx.array, rows: Sequence[Row], units: Sequence[RowUnit]
) -> mx.array | None:
    """Ids [R] of the rows that are due, unevaluated; only their last positions are projected."""
    positions, draws, end = [], [], 0
    for row, unit in zip(rows, units, strict=True):
        end += len(unit.tokens)
        if unit.samples:
            positions.append(end - 1)
            draws.append(Draw(row.options, row.next_index))
    if not positions:
        return None
    selected = hidden if len(positions) == hidden.shape[1] else hidden[:, mx.array(positions)]
    return sample(binding.project(selected)[0], draws, composed=binding.composition.composes_exponentials)
