"""Opens the stores of kept prefixes for a model that was just loaded. Imports mlx, as loading does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import ConfigurationError
from engine.execution.prefixes import PrefixKeeper
from engine.execution.resident import DEFAULT_DISK_BYTES
from engine.execution.state_identity import state_identity
from engine.generation.memory import PREFIX_SHARE
from engine.state.prefix_store import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.model import ModelInfo
    from engine.contracts.snapshot import LayerSnapshot
    from engine.execution.resident import EngineSettings
    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding


def open_prefixes(
    settings: EngineSettings, binding: MlxAutoregressiveBinding, info: ModelInfo, *, state_bytes: int
) -> PrefixKeeper:
    """The store in memory, never larger than the `state_bytes` that it shares, and one on disk if it was asked for."""
    wanted = settings.prefix_cache_bytes
    capacity_bytes = int(state_bytes * PREFIX_SHARE) if wanted is None else min(wanted, state_bytes)
    disk = None
    if settings.prefix_cache_dir is not None and capacity_bytes:
        from engine.state.prefix_disk import PrefixDisk  # few servers keep some on disk

        disk = PrefixDisk(
            settings.prefix_cache_dir,
            identity=state_identity(info),
            capacity_bytes=settings.prefix_cache_disk_bytes or DEFAULT_DISK_BYTES,
        )
    geometry = binding.geometry
    states_are_cut = binding.declaration.packed_segments and not geometry.sliding_window and geometry.recurrent is None
    return PrefixKeeper(PrefixStore(capacity_bytes), binding.cache_builder.restore, disk, states_are_cut=states_are_cut)


def no_prefixes(settings: EngineSettings) -> PrefixKeeper:
    """A keeper that keeps nothing, for a method whose states serve one row alone.

    Raises:
        ConfigurationError: prefixes were asked for.
    """
    for name in ("prefix_cache_dir", "prefix_cache_bytes"):
        if getattr(settings, name):
            raise ConfigurationError(name, "this model denoises blocks, and keeps no prefixes")
    return PrefixKeeper(PrefixStore(0), restore_nothing)


def restore_nothing(_snapshots: Sequence[LayerSnapshot], _tokens: int) -> list[Cache]:
    """Nothing was kept, so this is never called."""
    raise ValueError("nothing was kept that could be restored")
