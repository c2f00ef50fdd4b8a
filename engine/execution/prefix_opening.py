"""Opens the stores of kept prefixes for a model that was just loaded. Imports mlx, as loading does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from engine.contracts.errors import ConfigurationError
from engine.execution.prefixes import PrefixKeeper
from engine.generation.memory import PREFIX_SHARE
from engine.state.prefix_disk import PrefixDisk
from engine.state.prefix_store import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.model import ModelInfo
    from engine.contracts.snapshot import LayerSnapshot
    from engine.execution.resident import EngineSettings
    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding

DEFAULT_DISK_BYTES = 8 * 1024**3
STATE_REVISION = 2
"""To be raised whenever a graph or a cache of this build computes or lays out a state in another way."""


def open_prefixes(
    settings: EngineSettings, binding: MlxAutoregressiveBinding, info: ModelInfo, *, state_bytes: int
) -> PrefixKeeper:
    """The store in memory, never larger than the `state_bytes` that it shares, and one on disk if it was asked for."""
    wanted = settings.prefix_cache_bytes
    capacity_bytes = int(state_bytes * PREFIX_SHARE) if wanted is None else min(wanted, state_bytes)
    disk = None
    if settings.prefix_cache_dir is not None and capacity_bytes:
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
    return PrefixKeeper(PrefixStore(0), _restore_nothing)


def _restore_nothing(_snapshots: Sequence[LayerSnapshot], _tokens: int) -> list[Cache]:
    raise ValueError("no prefix was kept that could be restored")


def state_identity(info: ModelInfo) -> str:
    """Everything that must be equal for a state written by one process to serve another: weights, code, arithmetic."""
    composition = info.composition
    return json.dumps(
        {
            "weights": info.fingerprint,
            "model_type": info.model_type,
            "graph": asdict(info.descriptor),
            "geometry": asdict(info.geometry),
            "kv": repr(composition.kv),
            "paged_kv": None if composition.paged_kv is None else asdict(composition.paged_kv),
            "compute_dtype": composition.compute_dtype,
            "row_tile_tokens": composition.row_tile_tokens,
            "library_arithmetic": composition.library_arithmetic,
            "device": [info.runtime.device, info.runtime.device_name],
            "blas": info.runtime.blas,
            "versions": [info.runtime.mlx_version, STATE_REVISION],
        },
        sort_keys=True,
    )
