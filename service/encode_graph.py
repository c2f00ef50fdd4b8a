"""From what the engine tells about a graph to messages."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from mlxstream.v1 import graph_pb2

if TYPE_CHECKING:
    from engine.contracts.execution import ResolvedExecution
    from engine.contracts.graph import (
        GraphDeclaration,
        GraphDescriptor,
        GraphGeometry,
        MediaCapability,
        SpeculationCapability,
    )

_METHODS: Final = MappingProxyType(
    {
        "autoregressive": graph_pb2.GENERATION_METHOD_AUTOREGRESSIVE,
        "denoising": graph_pb2.GENERATION_METHOD_DENOISING,
    }
)
_MECHANISMS: Final = MappingProxyType(
    {
        "continuous": graph_pb2.EXECUTION_MECHANISM_CONTINUOUS,
        "unsupported": graph_pb2.EXECUTION_MECHANISM_UNSUPPORTED,
    }
)
_MEDIA_INPUTS: Final = MappingProxyType(
    {
        "embeddings": graph_pb2.MEDIA_INPUT_EMBEDDINGS,
        "embeddings+positions": graph_pb2.MEDIA_INPUT_EMBEDDINGS_AND_POSITIONS,
        "pixels": graph_pb2.MEDIA_INPUT_PIXELS,
    }
)
_DELAYED_AFFINE: Final = MappingProxyType(
    {
        "none": graph_pb2.DELAYED_AFFINE_NONE,
        "ordinary": graph_pb2.DELAYED_AFFINE_ORDINARY,
        "all": graph_pb2.DELAYED_AFFINE_ALL,
    }
)


def encode_descriptor(descriptor: GraphDescriptor) -> graph_pb2.GraphDescriptor:
    """Identity of a graph."""
    return graph_pb2.GraphDescriptor(
        id=descriptor.id,
        backend=descriptor.backend,
        graph_abi=descriptor.graph_abi,
        state_abi=descriptor.state_abi,
        artifact=descriptor.artifact,
    )


def encode_geometry(geometry: GraphGeometry) -> graph_pb2.GraphGeometry:
    """Sizes of a graph."""
    return graph_pb2.GraphGeometry(
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        layers=geometry.layers,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        context_length=geometry.context_length,
        layer_types=geometry.layer_types,
        sliding_window=geometry.sliding_window,
        canvas_length=geometry.canvas_length,
    )


def encode_execution(execution: ResolvedExecution) -> graph_pb2.ResolvedExecution:
    """The plan of one generation."""
    return graph_pb2.ResolvedExecution(
        method=_METHODS[execution.method],
        mechanism=_MECHANISMS[execution.mechanism],
        paged_kv=execution.paged_kv,
        prompt_cache=execution.prompt_cache,
        checkpoint=execution.checkpoint,
        fill=execution.fill,
        compiled_decode=execution.compiled_decode,
        grammar_jump=execution.grammar_jump,
        reasons=execution.reasons,
        kv_storage=execution.kv_storage,
        row_tile_tokens=execution.row_tile_tokens,
    )


def encode_declaration(declaration: GraphDeclaration) -> graph_pb2.GraphDeclaration:
    """What a graph promises."""
    draft = declaration.native_draft
    return graph_pb2.GraphDeclaration(
        method=_METHODS[declaration.method],
        packed_segments=declaration.packed_segments,
        adapters=graph_pb2.AdapterCapability(
            batched=declaration.adapters.batched, mountable=declaration.adapters.mountable
        ),
        media=_media(declaration.media) if declaration.media is not None else None,
        paged_attention=declaration.paged_attention,
        compiled_decode=declaration.compiled_decode,
        sparse_attention=declaration.sparse_attention,
        embeddings=declaration.embeddings,
        hidden_layer_taps=declaration.hidden_layer_taps,
        native_draft=graph_pb2.DraftCapability(kind=draft.kind, num_draft_tokens=draft.num_draft_tokens)
        if draft is not None
        else None,
        prefill=graph_pb2.PrefillCapability(bounded_workspace=declaration.prefill.bounded_workspace),
        kv=graph_pb2.KvCapability(
            dense_reads=declaration.kv.dense_reads, delayed_affine=_DELAYED_AFFINE[declaration.kv.delayed_affine]
        ),
        speculation=_speculation(declaration.speculation),
    )


def _media(media: MediaCapability) -> graph_pb2.MediaCapability:
    return graph_pb2.MediaCapability(input=_MEDIA_INPUTS[media.input], video=media.video)


def _speculation(speculation: SpeculationCapability) -> graph_pb2.SpeculationCapability:
    return graph_pb2.SpeculationCapability(
        adapters=speculation.adapters,
        logprobs=speculation.logprobs,
        affine_kv=speculation.affine_kv,
        turbo_kv=speculation.turbo_kv,
        external_tokens=speculation.external_tokens,
        grammar_proposals=speculation.grammar_proposals,
        immediate_affine4=speculation.immediate_affine4,
    )
