"""The autoregressive method over one bound graph, as the stepper drives it: packed steps, and a trial of the graph.

This module imports mlx, so the engine thread imports it, after the runtime was prepared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine.contracts.graph import PackedSegment
from engine.generation.autoregressive import dispatch_packed_step
from engine.state.state_arrays import to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.generation.autoregressive import PendingStep
    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
    from engine.generation.row import Row

TRIAL_TOKENS: Final = (3, 1)


class PackedMethod:
    """See `engine.execution.job.BoundMethod`."""

    def __init__(self, binding: MlxAutoregressiveBinding) -> None:
        """Borrow what `binding` joins."""
        self.graph = binding.graph
        self._binding = binding

    @property
    def weights_bytes(self) -> int:
        """Those of the graph: nothing else is made of its weights."""
        return self.graph.weights_bytes

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""
        return self._binding.make_cache()

    def dispatch(self, rows: Sequence[Row], after: PendingStep | None) -> PendingStep:
        """Start one forward of all `rows`."""
        return dispatch_packed_step(self._binding, rows, after)

    def works(self) -> bool:
        """Prefill a few tokens and decode one, so that kernels are compiled; whether all logits are finite."""
        caches = self.make_caches()
        try:
            finite = []
            for width in TRIAL_TOKENS:
                logits = _logits(self._binding, width, caches)
                finite.append(mx.isfinite(logits).all())
                mx.eval(finite, mx.argmax(logits, axis=-1))
            return all(flag.item() for flag in finite)
        finally:
            for cache in caches:
                cache.close()

    def close(self) -> None:
        """Release the graph."""
        self.graph.close()


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
