"""Drives the packed step of one bound graph for the engine thread, and tries the graph out.

This module imports mlx, so the engine thread imports it, after the runtime was prepared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.graph import PackedSegment
from engine.execution.usage import finish_usage
from engine.generation.autoregressive import dispatch_packed_step
from engine.state.state_arrays import to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.execution.adapter_mounts import AdapterMounts
    from engine.execution.checkpoints import CheckpointKeeper
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.scheduler import Limits
    from engine.generation.autoregressive import PendingStep
    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
    from engine.generation.row import Row
    from engine.generation.scopes import WiredScope

STEPS_BETWEEN_CLEARING = 256
TRIAL_TOKENS = (3, 1)


class PackedStepper:
    """See `engine.execution.job.Stepper`."""

    def __init__(
        self,
        binding: MlxAutoregressiveBinding,
        wired: WiredScope,
        limits: Limits,
        prefixes: PrefixKeeper,
        checkpoints: CheckpointKeeper,
        adapters: AdapterMounts | None = None,
    ) -> None:
        """Hold `wired` from first work to idle. `adapters` None: the graph takes none."""
        self._binding = binding
        self.adapters = adapters
        self._wired = wired
        self._steps = 0
        self.limits = limits
        self.prefixes = prefixes
        self.checkpoints = checkpoints
        self._wired.__enter__()

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, of adapters over them, and of kept prefixes."""
        return self._binding.graph.weights_bytes + self.prefixes.nbytes

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""
        return self._binding.make_cache()

    def dispatch(self, rows: Sequence[Row], after: PendingStep | None) -> PendingStep:
        """Start a step that advances `rows` by one unit each."""
        pending = dispatch_packed_step(self._binding, rows, after)
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
        return pending

    def ended(self) -> None:
        """A generation has ended: finish the accounts of its experts."""
        finish_usage(self._binding.experts)

    def probe(self) -> None:
        """Run a few tokens on fresh state; raises when the device no longer works."""
        exercise(self._binding)

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
        self._binding.graph.close()
        mx.clear_cache()


def exercise(binding: MlxAutoregressiveBinding) -> bool:
    """Prefill a few tokens and decode one, so that kernels are compiled; returns whether all logits are finite."""
    caches = binding.make_cache()
    try:
        finite = []
        for width in TRIAL_TOKENS:
            logits = _logits(binding, width, caches)
            finite.append(mx.isfinite(logits).all())
            mx.eval(finite, mx.argmax(logits, axis=-1))
        return all(flag.item() for flag in finite)
    finally:
        for cache in caches:
            cache.close()


def stores_states(binding: MlxAutoregressiveBinding) -> bool:
    """Whether a row's state can be written down and read back so that the next token has the very same logits."""
    caches = binding.make_cache()
    restored: list[Cache] = []
    try:
        _logits(binding, TRIAL_TOKENS[0], caches)
        layers = [cache.snapshot() for cache in caches]
        bare = [replace(layer, arrays={}) for layer in layers]
        restored = binding.cache_builder.restore(to_device(bare, to_host(layers)), TRIAL_TOKENS[0])
        return bool(mx.array_equal(_logits(binding, 1, caches), _logits(binding, 1, restored)).item())
    except (KeyError, ValueError):
        return False
    finally:
        for cache in (*caches, *restored):
            cache.close()


def _logits(binding: MlxAutoregressiveBinding, width: int, caches: Sequence[Cache]) -> mx.array:
    hidden = binding.hidden(mx.zeros((1, width), dtype=mx.uint32), [PackedSegment(width, caches)])
    logits = binding.project(hidden[:, -1:])
    mx.eval(logits, [cache.arrays() for cache in caches])
    return logits
