"""Opens the store of durable generations for a model that was just loaded. Imports mlx, as loading does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.graph import STATE_ABI_FOREIGN
from engine.execution.packed_method import stores_states
from engine.execution.resident import DEFAULT_DISK_BYTES, DurablePlace
from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
from engine.state.durable_disk import DurableDisk

if TYPE_CHECKING:
    from engine.execution.resident import EngineSettings
    from engine.generation.bindings.denoising import MlxDenoisingBinding


def open_durable(settings: EngineSettings, binding: MlxAutoregressiveBinding | MlxDenoisingBinding) -> DurablePlace:
    """The store, or why there is none.

    Our own caches are known to come back bit for bit; those of a foreign graph are tried.
    """
    if settings.checkpoint_bytes == 0:
        return DurablePlace(refusal="this server keeps no checkpoints: checkpoint_bytes is 0")
    if not isinstance(binding, MlxAutoregressiveBinding):
        return DurablePlace(refusal="a model that denoises blocks keeps no checkpoints")
    if binding.descriptor.state_abi == STATE_ABI_FOREIGN and not stores_states(binding):
        return DurablePlace(refusal="the state of this model's graph cannot be stored")
    return DurablePlace(
        store=DurableDisk(
            settings.state_dir,
            capacity_bytes=settings.checkpoint_bytes or DEFAULT_DISK_BYTES,
            max_age_seconds=settings.checkpoint_age_seconds,
        )
    )
