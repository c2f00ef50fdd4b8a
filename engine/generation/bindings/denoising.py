"""Joins a resident graph to the denoising method: its operations, checked by name, its table and its policies.

Nothing here reads which model the graph is. Weights are borrowed for the binding's lifetime; states that the graph
makes belong to the row that asked. The embedding table is made once, and all rows share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from engine.contracts.composition import COMPOSITION_DEFAULTS
from engine.contracts.denoising import GRAPH_ABI_DENOISING, DenoisingGraph, stopping_ids
from engine.contracts.errors import ConfigurationError, GraphContractError
from engine.contracts.graph import BACKEND_MLX, STATE_ABI_CACHE_ARRAY, GraphDescriptor
from engine.contracts.kv_scheme import PLAIN_KV
from engine.generation.bindings.prefill_policy import resolve_mlx_prefill_policy

if TYPE_CHECKING:
    import mlx.core as mx

    from engine.contracts.composition import Composition
    from engine.contracts.graph import ExpertRuntime, GraphDeclaration, GraphGeometry, ResidentGraph
    from engine.contracts.prefill import PrefillPolicy

OPERATIONS: Final = ("prefill", "extend_prefill", "decoder_logits", "dequant_embed_weight", "soft_embeddings")
"""What a graph must be able to do. Source: reference, denoising-and-models §3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxDenoisingBinding:
    """Everything that the denoising loop needs of a graph, fixed at bind time.

    `table` [V, H] is the embedding table as plain numbers, which takes `table_bytes` where it is no weight itself.
    `eos_token_ids` are the method's; what a model's own files name is not read.
    """

    graph: DenoisingGraph
    descriptor: GraphDescriptor
    declaration: GraphDeclaration
    geometry: GraphGeometry
    composition: Composition
    prefill_policy: PrefillPolicy
    eos_token_ids: tuple[int, ...]
    table: mx.array
    table_bytes: int
    experts: ExpertRuntime | None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the graph's weights, of adapters over them, and of the table."""
        return self.graph.weights_bytes + self.table_bytes


def bind_denoising_model(resident: ResidentGraph) -> MlxDenoisingBinding:
    """Bind a graph that declares the denoising method.

    Raises:
        GraphContractError: it declares another method, lacks an operation, or promises what the method does not use.
        ConfigurationError: keys and values are to be stored in a form that the method's states do not have.
    """
    declaration, geometry = resident.graph_capabilities, resident.geometry
    if declaration.method != "denoising":
        raise GraphContractError(f"the graph declares the {declaration.method} method, not the denoising one")
    graph = cast("DenoisingGraph", resident)
    assert_mlx_denoising_graph(graph)
    composition = graph.composition or COMPOSITION_DEFAULTS
    _refuse_unkept_promises(declaration, geometry, graph.canvas_length)
    if composition.kv != PLAIN_KV or composition.paged_kv is not None:
        raise ConfigurationError("kv_storage", f"{composition.kv_store_key}: a denoising graph keeps plain keys alone")
    table = graph.dequant_embed_weight()
    is_dense = table is graph.dequant_embed_weight()  # the weights' own; a quantized table is unpacked at each call
    return MlxDenoisingBinding(
        graph=graph,
        descriptor=_descriptor(graph.model_type),
        declaration=declaration,
        geometry=geometry,
        composition=composition,
        prefill_policy=resolve_mlx_prefill_policy(graph, composition.prefill_chunk_tokens),
        eos_token_ids=stopping_ids(geometry.vocab_size),
        table=table,
        table_bytes=0 if is_dense else table.nbytes,
        experts=graph.experts,
    )


def assert_mlx_denoising_graph(graph: DenoisingGraph) -> None:
    """Raise `GraphContractError` naming every operation that `graph` lacks."""
    missing = [name for name in OPERATIONS if not callable(getattr(graph, name, None))]
    if missing:
        raise GraphContractError(f"the graph declares the denoising method but provides no {', '.join(missing)}")


def _descriptor(model_type: str) -> GraphDescriptor:
    return GraphDescriptor(
        id=f"legacy-{model_type.replace('_', '-')}",
        backend=BACKEND_MLX,
        graph_abi=GRAPH_ABI_DENOISING,
        state_abi=STATE_ABI_CACHE_ARRAY,
        artifact="legacy-resident-model",
    )


def _refuse_unkept_promises(declaration: GraphDeclaration, geometry: GraphGeometry, canvas_length: int) -> None:
    if declaration.media is not None and (declaration.media.input != "pixels" or declaration.media.video):
        raise GraphContractError("the graph declares media in a form that the method does not give: pixels of stills")
    if (declaration.media is None) is not (geometry.vision is None):
        raise GraphContractError("the graph declares media and has no sizes of a tower, or the other way round")
    if geometry.canvas_length != canvas_length or canvas_length < 1:
        raise GraphContractError(
            f"the graph takes canvases of {canvas_length} positions, its geometry says {geometry.canvas_length}"
        )
