"""The denoising method: one bounded unit of one row at a time, a stretch of its prompt or a pass over its canvas.

A row's next unit depends on what its last one left, so it waits to be read; other rows' units are started meanwhile.
Runs on the engine thread. Source: reference, denoising-and-models §1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine.generation.canvas_block import CanvasBlock, revise
from engine.generation.denoising_row import RevisedCanvas
from engine.generation.row import RowFault
from engine.sampling.keys import KeySequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.denoising import DenoisingState
    from engine.generation.bindings.denoising import MlxDenoisingBinding
    from engine.generation.canvas_block import Revision
    from engine.generation.denoising_row import DenoisingRow, DenoisingUnit


def dispatch_denoising_unit(binding: MlxDenoisingBinding, row: DenoisingRow) -> PendingUnit:
    """Start the next unit of `row` without waiting for it. The unit must be read before the row's next one."""
    unit = row.next_unit()
    if unit.tokens:
        _encode(binding, row, unit)
    state = row.state
    if state is None:
        raise RuntimeError("a unit without tokens follows no other one")
    if not unit.revises:
        return PendingUnit(binding, row, state, None, None)
    block = row.block or _begin_block(binding, row)
    logits = binding.graph.decoder_logits(block.current, state, block.feedback)
    block.feedback = None
    revision = revise(block, logits, row.plan)
    _start([revision.tokens, revision.flags, block.current, block.draft, block.revealed])
    return PendingUnit(binding, row, state, block, revision)


def _encode(binding: MlxDenoisingBinding, row: DenoisingRow, unit: DenoisingUnit) -> None:
    """Start to append the tokens of `unit` to the row's state, or to make it of them."""
    ids = mx.array([list(unit.tokens)], dtype=mx.int32)
    if row.state is None:
        row.state = binding.graph.prefill(ids, row.options.adapters, unit.images)
    else:
        binding.graph.extend_prefill(ids, row.state, unit.images)
    _start(row.state.arrays())
    row.encoded(unit.tokens)


def _begin_block(binding: MlxDenoisingBinding, row: DenoisingRow) -> CanvasBlock:
    keys = row.keys or KeySequence(row.options.seed)
    before = keys.copy()
    block = CanvasBlock.of_noise(row.next_canvas_tokens, binding.geometry.vocab_size, keys)
    row.begin_block(block, keys, before)
    return block


def _start(arrays: Sequence[mx.array]) -> None:
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


class PendingUnit:
    """A unit that runs. A row that ends meanwhile is closed as ever, and what this brings is ignored."""

    def __init__(
        self,
        binding: MlxDenoisingBinding,
        row: DenoisingRow,
        state: DenoisingState,
        block: CanvasBlock | None,
        revision: Revision | None,
    ) -> None:
        self._binding = binding
        self._row = row
        self._state = state
        self._block = block
        self._revision = revision

    def may_follow(self, row: DenoisingRow) -> bool:
        """Whether `row` may start a unit before this one is read: any other row."""
        return row is not self._row

    def read(self) -> RevisedCanvas | RowFault | None:
        """Wait; what the pass has left, why it is of no use, or None while the prompt is read."""
        if self._block is None or self._revision is None:
            mx.eval(self._state.arrays())
            return None
        is_finite, ends = self._revision.flags.tolist()  # type: ignore[misc]
        if not is_finite:
            return RowFault("its logits are not finite")
        if not ends and self._row.block is self._block:
            self._feed_back(self._block, self._revision)
        wanted = ends or self._row.draft_blocks
        tokens = cast("list[int]", self._revision.tokens[0].tolist()) if wanted else []
        return RevisedCanvas(tuple(tokens), bool(ends))

    def _feed_back(self, block: CanvasBlock, revision: Revision) -> None:
        """Make the next pass's feedback, now that there is a next pass, and let go of what it is made of."""
        if revision.probabilities is not None:
            block.feedback = self._binding.graph.soft_embeddings(revision.probabilities, self._binding.table)
            _start([block.feedback])
