"""Joins a resident graph to the autoregressive method: its operations, state, memory and policies.

Nothing here reads which model the graph is. Weights are borrowed for the binding's lifetime; caches that it makes
belong to the row that asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.composition import COMPOSITION_DEFAULTS
from engine.contracts.errors import GraphContractError, UnsupportedOptionError
from engine.contracts.graph import (
    BACKEND_MLX,
    GRAPH_ABI_AUTOREGRESSIVE,
    STATE_ABI_CACHE_ARRAY,
    STATE_ABI_FOREIGN,
    GraphDescriptor,
)
from engine.contracts.kv_scheme import PLAIN_KV
from engine.generation.bindings.kv_storage import refuse_unreadable_storage
from engine.generation.bindings.prefill_policy import resolve_mlx_prefill_policy
from engine.state.build import CacheBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache, CacheMaker
    from engine.contracts.composition import Composition
    from engine.contracts.graph import ExpertRuntime, GraphDeclaration, GraphGeometry, PackedSegment, TokenGraph
    from engine.contracts.prefill import PrefillPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxAutoregressiveBinding:
    """Everything the autoregressive loop needs of a graph, fixed at bind time."""

    graph: TokenGraph
    descriptor: GraphDescriptor
    declaration: GraphDeclaration
    geometry: GraphGeometry
    composition: Composition
    prefill_policy: PrefillPolicy
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    cache_builder: CacheMaker
    experts: ExpertRuntime | None

    def make_cache(self) -> list[Cache]:
        """Fresh state for one row, as the composition says."""
        return self.cache_builder.make_caches()

    def maintain(self, segments: Sequence[PackedSegment]) -> None:
        """Before a step of `segments`: convert state that is due, layer by layer."""
        if self.cache_builder.converts:
            for segment in segments:
                for cache in segment.caches:
                    cache.maintain()

    def hidden(self, tokens: mx.array, segments: Sequence[PackedSegment]) -> mx.array:
        """Final hidden states [1, T, hidden] of packed `tokens` [1, T]."""
        return self.graph.hidden(tokens, segments)

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [1, P, V] of selected hidden states [1, P, hidden]."""
        return self.graph.project(hidden)

    def logits(self, tokens: mx.array, segments: Sequence[PackedSegment], due: Sequence[int]) -> mx.array | None:
        """Run one step.

        Args:
            tokens: packed ids [1, T]; each segment's are appended to its caches.
            segments: the rows' stretches. A graph that does not take them packed is run once for each.
            due: packed positions whose logits are wanted, ascending.

        Returns:
            Logits [P, V] in the order of `due`; None when it is empty.
        """
        if self.declaration.packed_segments:
            return self._projected(self.hidden(tokens, segments), due)
        parts, start = [], 0
        for segment in segments:
            end = start + segment.length
            own = [position - start for position in due if start <= position < end]
            parts.append(self._projected(self.hidden(tokens[:, start:end], [segment]), own))
            start = end
        wanted = [part for part in parts if part is not None]
        return wanted[0] if len(wanted) == 1 else mx.concatenate(wanted, axis=0) if wanted else None

    def _projected(self, hidden: mx.array, due: Sequence[int]) -> mx.array | None:
        if not due:
            return None
        selected = hidden if len(due) == hidden.shape[1] else hidden[:, mx.array(list(due))]
        return self.project(selected)[0]


def bind_mlx_autoregressive_graph(
    graph: TokenGraph, foreign_states: CacheMaker | None = None
) -> MlxAutoregressiveBinding:
    """Bind a graph that declares the autoregressive method.

    Args:
        graph: the graph.
        foreign_states: makes the state of its rows, where the graph is mlx-lm's and brings its own.

    Raises:
        UnsupportedOptionError: the composition wants a KV scheme of the graph, and the graph keeps its own.
        GraphContractError: the graph declares another method, or promises an operation that it lacks.
        ConfigurationError: its attention cannot read the form in which the composition stores keys and values.
    """
    declaration = graph.graph_capabilities
    if declaration.method != "autoregressive":
        raise GraphContractError(f"the graph declares the {declaration.method} method, not the autoregressive one")
    _refuse_unkept_promises(declaration)
    composition = graph.composition or COMPOSITION_DEFAULTS
    if foreign_states is not None and (composition.kv != PLAIN_KV or composition.paged_kv is not None):
        raise UnsupportedOptionError("composition.kv", "a graph of mlx-lm keeps its state as mlx-lm does")
    refuse_unreadable_storage(declaration, graph.geometry, composition)
    binding = MlxAutoregressiveBinding(
        graph=graph,
        descriptor=GraphDescriptor(
            id=f"{'legacy' if foreign_states is None else 'mlx-lm'}:{graph.model_type}",
            backend=BACKEND_MLX,
            graph_abi=GRAPH_ABI_AUTOREGRESSIVE,
            state_abi=STATE_ABI_CACHE_ARRAY if foreign_states is None else STATE_ABI_FOREIGN,
            artifact="legacy-resident-model" if foreign_states is None else f"mlx-lm {version('mlx-lm')}",
        ),
        declaration=declaration,
        geometry=graph.geometry,
        composition=composition,
        prefill_policy=resolve_mlx_prefill_policy(graph, composition.prefill_chunk_tokens),
        eos_token_ids=graph.eos_token_ids,
        weights_bytes=graph.weights_bytes,
        cache_builder=foreign_states or CacheBuilder(graph.geometry, composition),
        experts=graph.experts,
    )
    assert_mlx_autoregressive_binding(binding)
    return binding


def assert_mlx_autoregressive_binding(binding: MlxAutoregressiveBinding) -> None:
    """Check the descriptor against the ABIs that the method understands; raises `GraphContractError`."""
    descriptor = binding.descriptor
    wanted = {
        "backend": (descriptor.backend, (BACKEND_MLX,)),
        "graph_abi": (descriptor.graph_abi, (GRAPH_ABI_AUTOREGRESSIVE,)),
        "state_abi": (descriptor.state_abi, (STATE_ABI_CACHE_ARRAY, STATE_ABI_FOREIGN)),
    }
    for field, (found, known) in wanted.items():
        if found not in known:
            raise GraphContractError(
                f"binding {descriptor.id} has {field} {found!r}; the method needs {' or '.join(map(repr, known))}"
            )


def _refuse_unkept_promises(declaration: GraphDeclaration) -> None:
    """Refuse declarations whose operation the token-graph Protocol does not hold yet."""
    promised = {
        "media": declaration.media is not None,
        "compiled_decode": declaration.compiled_decode,
        "embeddings": declaration.embeddings,
        "native_draft": declaration.native_draft is not None,
        "hidden_layer_taps": declaration.hidden_layer_taps,
        "paged_attention": declaration.paged_attention,
    }
    missing = sorted(name for name, promise in promised.items() if promise)
    if missing:
        raise GraphContractError(f"the graph declares {', '.join(missing)} but provides no such operation")
