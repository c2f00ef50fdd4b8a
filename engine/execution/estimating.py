"""Predicts the memory of a model that is not loaded, from its headers and its device's memory. Reads no tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.artifacts.artifact import open_artifact
from engine.artifacts.catalogue import resolve
from engine.artifacts.resident_size import resident_bytes
from engine.execution.composing import compose, weights_facts
from engine.execution.state_room import MemoryFacts
from engine.generation.bindings.prefill_policy import FixedChunk
from engine.generation.memory import ELEMENT_BYTES, usable_bytes
from engine.runtime.device import choose_device, offered_devices
from engine.runtime.host import Host
from engine.runtime.memory import memory_before_loading
from engine.runtime.policy import choose_layout

if TYPE_CHECKING:
    from engine.execution.resident import EngineSettings
    from engine.runtime.memory import DeviceMemory
    from engine.runtime.policy import ComputeDtype


def memory_here(wish: str | None = None) -> DeviceMemory:
    """The memory of the device that serving would choose on this machine if it were asked for `wish`.

    Raises:
        ConfigurationError: that device is not there.
    """
    return memory_before_loading(choose_device(wish, offered=offered_devices()), Host())


def unloaded_facts(settings: EngineSettings, memory: DeviceMemory | None = None) -> MemoryFacts:
    """What loading would establish if `settings.model`, which is on this machine, were served as `settings` say.

    Args:
        settings: the model, and how it is served.
        memory: of the device that would hold it; None: of the one that `settings` lead to here.

    Raises:
        EngineError: there is no such model here, its files cannot be used, or the device is not there.
    """
    artifact = open_artifact(resolve(settings.model).path)
    memory = memory or memory_here(settings.device)
    available_bytes = memory.available_bytes()
    layout = choose_layout(
        weights_facts(artifact),
        device=memory.device,
        dtype_wish=cast("ComputeDtype | None", settings.dtype),
        few_row_products_are_fast=True,  # as every BLAS that we bring makes them
        available_bytes=available_bytes,
    )
    composition = compose(artifact, memory.device, layout, settings)
    step_tokens = settings.prefill_step_tokens or layout.prefill_step_tokens
    weights_bytes = resident_bytes(
        artifact,
        element_bytes=ELEMENT_BYTES[composition.compute_dtype],
        dequantize=layout.dequantize,
        pretranspose=layout.pretranspose_linear,
    )
    state_bytes = settings.state_bytes
    if state_bytes is None:
        state_bytes = usable_bytes(max(0, available_bytes - weights_bytes))
    return MemoryFacts(
        geometry=artifact.config.geometry(),
        composition=composition,
        prefill_policy=FixedChunk(composition.prefill_chunk_tokens or step_tokens),
        weights_bytes=weights_bytes,
        step_tokens=step_tokens,
        state_bytes=state_bytes,
        holds_workspace=settings.state_bytes is None,
    )
