"""Drives the steps of one resident model for the engine thread, whatever its method.

This module imports mlx, so the engine thread imports it, after the runtime was prepared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.execution.adapter_mounts import AdapterMounts
    from engine.execution.checkpoints import CheckpointKeeper
    from engine.execution.job import BoundMethod, Pending
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.scheduler import Limits
    from engine.generation.scopes import WiredScope

logger = logging.getLogger(__name__)

STEPS_BETWEEN_CLEARING: Final = 256


class MethodStepper:
    """See `engine.execution.job.Stepper`."""

    def __init__(
        self,
        method: BoundMethod,
        wired: WiredScope,
        limits: Limits,
        prefixes: PrefixKeeper,
        checkpoints: CheckpointKeeper,
        adapters: AdapterMounts | None = None,
    ) -> None:
        """Hold `wired` from first work to idle. `adapters` None: the graph takes none."""
        self.limits = limits
        self.prefixes = prefixes
        self.checkpoints = checkpoints
        self.adapters = adapters
        self._method = method
        self._wired = wired
        self._steps = 0
        self._wired.__enter__()

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, of adapters over them, and of kept prefixes."""
        return self._method.weights_bytes + self.prefixes.nbytes

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""
        return self._method.make_caches()

    def dispatch(self, rows: Sequence[Any], after: Any) -> Pending:
        """Start a step that advances `rows` by one unit each."""
        pending = self._method.dispatch(rows, after)
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
        return pending

    def ended(self) -> None:
        """A generation has ended: finish the accounts of its experts. What fails there ends nobody."""
        experts = self._method.graph.experts
        if experts is None:
            return
        try:
            experts.finish_usage()
        except Exception:
            logger.exception("the accounts of experts' use could not be written")

    def probe(self) -> None:
        """Compute a little; raises when the device no longer works."""
        self._method.works()

    def resume(self) -> None:
        """Work begins: keep the weights wired."""
        self._wired.__enter__()

    def rest(self) -> None:
        """Work has ended: give memory back to the system."""
        self._wired.__exit__()
        mx.clear_cache()

    def close(self) -> None:
        """Release the weights and what is kept of rows."""
        self.prefixes.close()
        self.checkpoints.close()
        self._method.close()
        mx.clear_cache()
