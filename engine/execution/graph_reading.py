"""The first half of bringing tensors in, on the engine thread: how a model is held, and its graph with all weights.

Imports mlx, so the engine thread imports it, after the runtime was prepared; and little else, since reading begins no
sooner than all of it is imported. What follows is in `loading`, which is imported while weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.resident_size import resident_bytes
from engine.artifacts.weights import WeightStore
from engine.contracts.errors import ConfigurationError
from engine.contracts.load import LoadPhase, LoadProgress
from engine.execution.composing import compose, weights_facts
from engine.generation.memory import ELEMENT_BYTES
from engine.models.reading import WeightReader
from engine.models.registry import build_denoising_graph, build_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.cache import CacheMaker
    from engine.contracts.composition import Composition
    from engine.contracts.graph import ResidentGraph
    from engine.execution.resident import EngineSettings, ModelFiles
    from engine.ops.adapted import AdapterSites
    from engine.runtime.policy import LayoutPolicy
    from engine.runtime.prepare import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGraph:
    """A graph that holds its weights, and how it holds them.

    `foreign_states` makes the state of rows where the graph is mlx-lm's; `adapter_sites` is where adapters go, None
    where none can.
    """

    graph: ResidentGraph
    layout: LayoutPolicy
    composition: Composition
    foreign_states: CacheMaker | None = None
    adapter_sites: AdapterSites | None = None


def read_graph(
    files: ModelFiles,
    runtime: Runtime,
    settings: EngineSettings,
    *,
    before_each: Callable[[], None],
    before_waiting: Callable[[], None],
    progress: Callable[[LoadProgress], None],
    beside: bool,
) -> ReadGraph:
    """Build the graph of `files.artifact`, ours or mlx-lm's.

    Args:
        files: the model.
        runtime: the prepared machinery.
        settings: how it is held.
        before_each: called before each product, and while values are waited for; it may raise to end the load.
        before_waiting: called once, when the interpreter begins to be little needed.
        progress: told what is done.
        beside: whether another model is resident, and stays so if this one has no room.

    Raises:
        ArtifactError: weights are missing, damaged or left over.
        ConfigurationError: keys and values cannot be stored as the settings ask, memory is too small for the weights
            beside another model, or a graph of mlx-lm is to take adapters.
    """
    artifact = files.artifact
    facts = weights_facts(artifact)
    layout = runtime.layout(facts)
    composition = compose(artifact, runtime.info.device, layout, settings)
    if beside:
        _require_room_beside(files, layout, composition, runtime)
    total_bytes = artifact.weights_bytes
    progress(LoadProgress(phase=LoadPhase.READING, total_bytes=total_bytes))
    if artifact.graph == "mlx-lm":
        if files.adapters:
            raise ConfigurationError("adapters", "a graph of mlx-lm takes no adapters")
        before_waiting()
        from engine.models.foreign import load_foreign_graph  # seldom needed, and takes a while

        foreign = load_foreign_graph(
            artifact, layout, composition, stored_dtype=facts.stored_dtype, before_each=before_each
        )
        return ReadGraph(graph=foreign, layout=layout, composition=composition, foreign_states=foreign.states)

    def between_jobs() -> None:
        progress(LoadProgress(phase=LoadPhase.READING, done_bytes=reader.read_bytes, total_bytes=total_bytes))
        before_each()

    store = WeightStore(artifact, unpacked_dtype=getattr(mx, layout.compute_dtype))
    reader = WeightReader(
        store, layout, before_each=between_jobs, before_waiting=before_waiting, unpack_kernel=runtime.unpack_kernel
    )
    try:
        build = build_denoising_graph if artifact.config.method == "denoising" else build_graph
        graph = build(artifact.config, reader, composition)
        return ReadGraph(graph=graph, layout=layout, composition=composition, adapter_sites=graph.adapters)
    finally:
        reader.close()
        store.close()


def _require_room_beside(files: ModelFiles, layout: LayoutPolicy, composition: Composition, runtime: Runtime) -> None:
    """Refuse weights that do not fit beside the model that is there, before any is read."""
    needed = resident_bytes(
        files.artifact,
        element_bytes=ELEMENT_BYTES[composition.compute_dtype],
        dequantize=layout.dequantize,
        pretranspose=layout.pretranspose_linear,
    )
    if not runtime.memory.fits(needed):
        raise ConfigurationError(
            "model",
            f"the weights of {files.name} would take {needed} bytes beside the served model, and "
            f"{runtime.memory.available_bytes()} are available; unload that one first",
        )
