"""Drives the denoising units of one bound graph for the engine thread, and tries the graph out.

This module imports mlx, so the engine thread imports it, after the runtime was prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.execution.usage import finish_usage
from engine.generation.denoising import dispatch_denoising_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.execution.adapter_mounts import AdapterMounts
    from engine.execution.checkpoints import CheckpointKeeper
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.scheduler import Limits
    from engine.generation.bindings.denoising import MlxDenoisingBinding
    from engine.generation.denoising import PendingUnit
    from engine.generation.denoising_row import DenoisingRow, RevisedCanvas
    from engine.generation.row import RowFault
    from engine.generation.scopes import WiredScope

UNITS_BETWEEN_CLEARING = 256
TRIAL_TOKENS = 3


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


class DenoisingStepper:
    """See `engine.execution.job.Stepper`. Rows make their own state, and keep none for others."""

    def __init__(
        self,
        binding: MlxDenoisingBinding,
        wired: WiredScope,
        limits: Limits,
        prefixes: PrefixKeeper,
        checkpoints: CheckpointKeeper,
        adapters: AdapterMounts | None = None,
    ) -> None:
        """Hold `wired` from first work to idle; `prefixes` and `checkpoints` keep nothing.

        `adapters` None: the graph takes none.
        """
        self._binding = binding
        self.adapters = adapters
        self._wired = wired
        self._units = 0
        self.limits = limits
        self.prefixes = prefixes
        self.checkpoints = checkpoints
        self._wired.__enter__()

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights."""
        return self._binding.graph.weights_bytes

    def make_caches(self) -> list[Cache]:
        """None: the graph makes a row's state when it reads the first of its prompt."""
        return []

    def dispatch(self, rows: Sequence[DenoisingRow], after: PendingUnits | None) -> PendingUnits:  # noqa: ARG002
        """Start a unit of each of `rows`."""
        pending = PendingUnits([dispatch_denoising_unit(self._binding, row) for row in rows])
        self._units += 1
        if self._units % UNITS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
        return pending

    def ended(self) -> None:
        """A generation has ended: finish the accounts of its experts."""
        finish_usage(self._binding.experts)

    def probe(self) -> None:
        """Run a small canvas of its own; raises when the device no longer works."""
        try_denoising(self._binding)

    def resume(self) -> None:
        """Work begins: keep the weights wired."""
        self._wired.__enter__()

    def rest(self) -> None:
        """Work has ended: give memory back to the system."""
        self._wired.__exit__()
        mx.clear_cache()

    def close(self) -> None:
        """Release the weights."""
        self.prefixes.close()
        self._binding.graph.close()
        mx.clear_cache()


def try_denoising(binding: MlxDenoisingBinding) -> bool:
    """Encode a few tokens and make two passes, so that kernels are compiled; returns whether all logits are finite."""
    graph, length = binding.graph, min(TRIAL_TOKENS, binding.geometry.canvas_length)
    state = graph.prefill(mx.zeros((1, TRIAL_TOKENS), dtype=mx.int32))
    try:
        canvas = mx.zeros((1, length), dtype=mx.int32)
        first = graph.decoder_logits(canvas, state, None)
        feedback = graph.soft_embeddings(mx.softmax(first, axis=-1, precise=True), binding.table)
        second = graph.decoder_logits(canvas, state, feedback)
        return bool(mx.isfinite(second).all().item())
    finally:
        state.close()
