"""The denoising method over one bound graph, as the stepper drives it: units of rows, and a trial of the graph.

This module imports mlx, so the engine thread imports it, after the runtime was prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np

from engine.contracts.vision import PromptImage
from engine.generation.denoising import dispatch_denoising_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.generation.bindings.denoising import MlxDenoisingBinding
    from engine.generation.denoising import PendingUnit
    from engine.generation.denoising_row import DenoisingRow, RevisedCanvas
    from engine.generation.row import RowFault

TRIAL_TOKENS: Final = 3


class DenoisingMethod:
    """See `engine.execution.job.BoundMethod`. Rows make their own state, and keep none for others."""

    def __init__(self, binding: MlxDenoisingBinding) -> None:
        """Borrow what `binding` joins."""
        self.graph = binding.graph
        self._binding = binding

    @property
    def weights_bytes(self) -> int:
        """Those of the graph, and of the table that was unpacked for feedback."""
        return self._binding.weights_bytes

    def make_caches(self) -> list[Cache]:
        """None: the graph makes a row's state when it reads the first of its prompt."""
        return []

    def dispatch(self, rows: Sequence[DenoisingRow], after: PendingUnits | None) -> PendingUnits:  # noqa: ARG002
        """Start a unit of each of `rows`."""
        return PendingUnits([dispatch_denoising_unit(self._binding, row) for row in rows])

    def works(self) -> bool:
        """Encode a few tokens and make two passes, so that kernels are compiled; whether all logits are finite.

        Where the graph sees, one of the tokens is an image's.
        """
        graph, length = self.graph, min(TRIAL_TOKENS, self._binding.geometry.canvas_length)
        state = graph.prefill(mx.zeros((1, TRIAL_TOKENS), dtype=mx.int32), (), _trial_images(self._binding))
        try:
            canvas = mx.zeros((1, length), dtype=mx.int32)
            first = graph.decoder_logits(canvas, state, None)
            feedback = graph.soft_embeddings(mx.softmax(first, axis=-1, precise=True), self._binding.table)
            second = graph.decoder_logits(canvas, state, feedback)
            return bool(mx.isfinite(second).all().item())
        finally:
            state.close()

    def close(self) -> None:
        """Release the graph and the table."""
        self.graph.close()
        del self._binding


class PendingUnits:
    """Units of several rows, started one after the other."""

    def __init__(self, units: Sequence[PendingUnit]) -> None:
        self._units = units

    def may_follow(self, row: DenoisingRow) -> bool:
        """Whether `row` has no part in this."""
        return all(unit.may_follow(row) for unit in self._units)

    def read(self) -> list[RevisedCanvas | RowFault | None]:
        """Wait; what each row's unit has brought."""
        return [unit.read() for unit in self._units]


def _trial_images(binding: MlxDenoisingBinding) -> list[PromptImage]:
    """A grey image of one token, for a graph that takes images."""
    vision = binding.geometry.vision
    if vision is None:
        return []
    grey = np.full((vision.token_pixels, vision.token_pixels, 3), 127, dtype=np.uint8)
    return [PromptImage(start=0, tokens=1, pixels=grey)]
