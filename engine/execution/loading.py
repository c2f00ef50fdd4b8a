"""The second half of bringing tensors in, on the engine thread: adapters, binding, warm-up, facts.

This module imports mlx, so the engine thread imports it, after the runtime was prepared, and while weights are read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine.contracts.errors import ConfigurationError, CorruptArtifactError
from engine.contracts.load import LoadPhase, LoadProgress
from engine.contracts.model import ModelInfo
from engine.contracts.options import OptionDefaults
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.durable_opening import open_durable
from engine.execution.packed_method import PackedMethod
from engine.execution.prefix_opening import no_prefixes, open_prefixes, restore_nothing
from engine.execution.scheduler import Limits, no_workspace
from engine.execution.state_room import smallest_row_bytes
from engine.execution.stepper import MethodStepper
from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding, bind_mlx_autoregressive_graph
from engine.generation.memory import usable_bytes, workspace_bytes
from engine.generation.scopes import WiredScope, needs_wired_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.artifacts.artifact import Artifact
    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.durability import DurableStore
    from engine.contracts.graph import TokenGraph
    from engine.execution.adapter_mounts import AdapterMounts
    from engine.execution.graph_reading import ReadGraph
    from engine.execution.job import BoundMethod, Stepper
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.resident import DurablePlace, EngineSettings, ModelFiles
    from engine.generation.bindings.denoising import MlxDenoisingBinding
    from engine.runtime.policy import LayoutPolicy
    from engine.runtime.prepare import Runtime

    Binding = MlxAutoregressiveBinding | MlxDenoisingBinding


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What loading yields: the stepper for the thread, and the facts for everybody."""

    stepper: Stepper
    info: ModelInfo
    binding: Binding
    durable: DurablePlace


def load_model(
    files: ModelFiles,
    read: ReadGraph,
    runtime: Runtime,
    settings: EngineSettings,
    *,
    fingerprint: Callable[[], str],
    has_chat_template: Callable[[], bool],
    before_each: Callable[[], None],
    progress: Callable[[LoadProgress], None],
    started_at: float,
) -> LoadedModel:
    """Bind and warm the graph that was read of `files.artifact`; `before_each` part may raise to end the load.

    Raises:
        ArtifactError: an adapter cannot be used, or does not fit.
        ConfigurationError: memory is too small for any request, or the model takes no adapters or keeps no prefixes.
        CorruptArtifactError: weights are not finite numbers.
        GraphContractError: the graph does not keep its promises.
    """
    artifact = files.artifact
    mounts, adapters = _mounted(files, read)
    binding, method = _bound(read)
    progress(LoadProgress(phase=LoadPhase.WARMING))
    before_each()
    if not method.works():
        raise CorruptArtifactError(artifact.path.name, "its weights give results that are not finite numbers")
    info = ModelInfo(
        name=files.name,
        fingerprint=fingerprint(),
        model_type=artifact.config.model_type,
        descriptor=binding.descriptor,
        declaration=binding.declaration,
        geometry=binding.geometry,
        composition=read.composition,
        runtime=runtime.info,
        eos_token_ids=binding.eos_token_ids,
        bos_token_id=artifact.config.bos_token_id,
        option_defaults=_option_defaults(binding, files.artifact),
        weights_bytes=binding.weights_bytes,
        parameters=artifact.parameters,
        stored_quantization=artifact.stored_quantization,
        has_chat_template=has_chat_template(),
        load_seconds=time.perf_counter() - started_at,
        adapters=adapters,
    )
    limits = _limits(binding, read.layout, runtime, settings)
    _require_room(info, limits, settings)
    durable = open_durable(settings, binding)
    prefixes, checkpoints = _keepers(settings, binding, info, limits, durable.store)
    stepper = MethodStepper(method, _wired_scope(binding, runtime), limits, prefixes, checkpoints, mounts)
    return LoadedModel(stepper=stepper, info=info, binding=binding, durable=durable)


def _option_defaults(binding: Binding, artifact: Artifact) -> OptionDefaults:
    """The defaults that requests get from the model: what its files name for a draw, if its method draws."""
    draws = isinstance(binding, MlxAutoregressiveBinding)
    return artifact.config.option_defaults if draws else OptionDefaults()


def _keepers(
    settings: EngineSettings, binding: Binding, info: ModelInfo, limits: Limits, store: DurableStore | None
) -> tuple[PrefixKeeper, CheckpointKeeper]:
    """What is kept of rows.

    Raises:
        ConfigurationError: prefixes are to be kept of a model that keeps none.
    """
    if not isinstance(binding, MlxAutoregressiveBinding):
        return no_prefixes(settings), CheckpointKeeper(restore_nothing)
    prefixes = open_prefixes(settings, binding, info, state_bytes=limits.state_bytes)
    return prefixes, CheckpointKeeper(binding.cache_builder.restore, store)


def _bound(read: ReadGraph) -> tuple[Binding, BoundMethod]:
    """The graph, bound to its method."""
    if read.graph.graph_capabilities.method == "denoising":
        from engine.execution.denoising_method import DenoisingMethod  # few models denoise
        from engine.generation.bindings.denoising import bind_denoising_model

        denoising = bind_denoising_model(read.graph)
        return denoising, DenoisingMethod(denoising)
    binding = bind_mlx_autoregressive_graph(cast("TokenGraph", read.graph), read.foreign_states)
    return binding, PackedMethod(binding)


def _mounted(files: ModelFiles, read: ReadGraph) -> tuple[AdapterMounts | None, tuple[AdapterInfo, ...]]:
    """Where adapters go, and the account of each that is mounted now; what cannot be mounted ends the load."""
    sites = read.adapter_sites
    if sites is None:
        if files.adapters:
            raise ConfigurationError("adapters", "this model takes no adapters")
        return None, ()
    from engine.execution.adapter_mounts import AdapterMounts  # few servers take adapters

    mounts = AdapterMounts(sites=sites, artifact=files.artifact, compute_dtype=read.composition.compute_dtype)
    return mounts, tuple(mounts.mount(one) for one in files.adapters)


def _limits(binding: Binding, layout: LayoutPolicy, runtime: Runtime, settings: EngineSettings) -> Limits:
    """What fits beside the weights, asked for once they are resident."""
    step_tokens = settings.prefill_step_tokens or layout.prefill_step_tokens
    stated = settings.state_bytes
    return Limits(
        max_rows=settings.max_rows,
        prefill_step_tokens=step_tokens,
        prefill_chunk_tokens=settings.prefill_step_tokens or layout.prefill_chunk_tokens,
        mixed_prefill_tokens=min(step_tokens, layout.mixed_prefill_tokens),
        mixed_row_tokens=layout.mixed_row_tokens,
        state_bytes=usable_bytes(runtime.memory.available_bytes()) if stated is None else stated,
        workspace_bytes=partial(workspace_bytes, binding.geometry, binding.composition)
        if stated is None
        else no_workspace,
        rows_per_step=1 if binding.declaration.method == "denoising" else None,
    )


def _require_room(info: ModelInfo, limits: Limits, settings: EngineSettings) -> None:
    """Refuse a model that would answer nothing, unless the operator has bounded states so and is told of it."""
    needed = smallest_row_bytes(info) + limits.workspace_bytes(step_tokens=1, context_tokens=2)
    if settings.state_bytes is None and needed > limits.state_bytes:
        raise ConfigurationError(
            "model",
            f"beside the weights of {info.name}, rows may take {limits.state_bytes} bytes of this machine's memory, "
            f"and the shortest takes {needed}",
        )


def _wired_scope(binding: Binding, runtime: Runtime) -> WiredScope:
    working_set_bytes = runtime.memory.limit_bytes if runtime.memory.device == "metal" else None
    wired = needs_wired_limit(
        weights_bytes=binding.weights_bytes,
        planned_expert_bytes=0 if binding.experts is None else binding.experts.planned_bytes,
        working_set_bytes=working_set_bytes or 0,
    )
    return WiredScope(
        limit_bytes=binding.weights_bytes if wired else 0, set_limit=mx.set_wired_limit, synchronize=mx.synchronize
    )
