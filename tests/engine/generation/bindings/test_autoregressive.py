"""The binding: identifiers of the source document, defaults, and a refusal for every broken promise."""

import dataclasses

import pytest

from engine.contracts.composition import COMPOSITION_DEFAULTS, Composition
from engine.contracts.errors import GraphContractError
from engine.contracts.graph import DraftCapability, GraphDeclaration, GraphDescriptor, GraphGeometry, MediaCapability
from engine.generation.bindings.autoregressive import (
    assert_mlx_autoregressive_binding,
    bind_mlx_autoregressive_graph,
)


class FakeGraph:
    model_type = "llama"
    eos_token_ids = (2,)
    weights_bytes = 123
    experts = None

    def __init__(self, declaration=None, composition=None):
        self.graph_capabilities = declaration or GraphDeclaration()
        self.composition = composition
        self.geometry = GraphGeometry(
            vocab_size=10,
            hidden_size=8,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=4,
            context_length=32,
            layer_types=("full_attention", "sliding_attention"),
            sliding_window=8,
        )


def test_the_descriptor_carries_the_published_identifiers():
    assert bind_mlx_autoregressive_graph(FakeGraph()).descriptor == GraphDescriptor(
        id="legacy:llama",
        backend="mlx",
        graph_abi="mlx-hidden-bsh-v1",
        state_abi="legacy-cache-array-v1",
        artifact="legacy-resident-model",
    )


def test_a_graph_without_a_composition_runs_under_the_defaults():
    assert bind_mlx_autoregressive_graph(FakeGraph()).composition == COMPOSITION_DEFAULTS
    chosen = Composition(prefill_chunk_tokens=48)
    binding = bind_mlx_autoregressive_graph(FakeGraph(composition=chosen))
    assert binding.composition == chosen
    assert binding.prefill_policy.chunk_size(1000) == 48


def test_each_row_gets_its_own_cache_for_every_layer():
    binding = bind_mlx_autoregressive_graph(FakeGraph())
    first, second = binding.make_cache(), binding.make_cache()
    assert len(first) == len(second) == 2
    assert not {id(cache) for cache in first} & {id(cache) for cache in second}


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        (GraphDeclaration(method="denoising"), "denoising"),
        (GraphDeclaration(media=MediaCapability(input="pixels")), "media"),
        (GraphDeclaration(compiled_decode=True), "compiled_decode"),
        (GraphDeclaration(embeddings=True), "embeddings"),
        (GraphDeclaration(native_draft=DraftCapability(kind="mtp", num_draft_tokens=2)), "native_draft"),
        (GraphDeclaration(hidden_layer_taps=True), "hidden_layer_taps"),
        (GraphDeclaration(paged_attention=True), "paged_attention"),
    ],
)
def test_a_promise_without_its_operation_is_refused_by_name(declaration, named):
    with pytest.raises(GraphContractError, match=named):
        bind_mlx_autoregressive_graph(FakeGraph(declaration))


@pytest.mark.parametrize("field", ["backend", "graph_abi", "state_abi"])
def test_a_foreign_abi_is_refused_by_name(field):
    binding = bind_mlx_autoregressive_graph(FakeGraph())
    foreign = dataclasses.replace(
        binding, descriptor=dataclasses.replace(binding.descriptor, **{field: "something-else"})
    )
    with pytest.raises(GraphContractError, match=f"{field} 'something-else'"):
        assert_mlx_autoregressive_binding(foreign)
