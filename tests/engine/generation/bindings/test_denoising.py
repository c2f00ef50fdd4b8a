"""Binding a graph to the denoising method: what is refused, and what is fixed."""

from dataclasses import replace

import pytest

from engine.contracts.composition import Composition, PagedKvComposition
from engine.contracts.errors import ConfigurationError, GraphContractError
from engine.contracts.graph import GraphDeclaration, GraphDescriptor, MediaCapability
from engine.contracts.kv_scheme import AffineKv
from engine.generation.bindings.denoising import OPERATIONS, bind_denoising_model
from tests.engine.generation.scripted_denoiser import DECLARATION, GEOMETRY, ScriptedGraph


def without(operation):
    """A graph that lacks `operation`."""
    kind = type("Lacking", (ScriptedGraph,), {operation: None})
    return kind()


def test_a_binding_names_the_method_s_contracts():
    binding = bind_denoising_model(ScriptedGraph(model_type="diffusion_gemma"))
    assert binding.descriptor == GraphDescriptor(
        id="legacy-diffusion-gemma",
        backend="mlx",
        graph_abi="mlx-denoising-v1",
        state_abi="legacy-cache-array-v1",
        artifact="legacy-resident-model",
    )
    assert binding.table.shape == (GEOMETRY.vocab_size, GEOMETRY.hidden_size)


@pytest.mark.parametrize(("vocabulary", "ends"), [(32, (1,)), (107, (1, 106))])
def test_the_ends_are_the_method_s_and_not_those_that_the_model_names(vocabulary, ends):
    geometry = replace(GEOMETRY, vocab_size=vocabulary)
    assert bind_denoising_model(ScriptedGraph(geometry=geometry, eos_token_ids=(50, 3))).eos_token_ids == ends


def test_a_graph_of_another_method_is_refused():
    with pytest.raises(GraphContractError, match="declares the autoregressive method"):
        bind_denoising_model(ScriptedGraph(graph_capabilities=GraphDeclaration()))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_graph_that_lacks_an_operation_is_refused_by_its_name(operation):
    with pytest.raises(GraphContractError, match=f"provides no {operation}$"):
        bind_denoising_model(without(operation))


def test_all_operations_that_are_lacking_are_named():
    kind = type("Bare", (ScriptedGraph,), dict.fromkeys(OPERATIONS))
    with pytest.raises(GraphContractError, match=f"provides no {', '.join(OPERATIONS)}$"):
        bind_denoising_model(kind())


def test_media_that_nothing_takes_are_refused():
    declaration = replace(DECLARATION, media=MediaCapability(input="pixels"))
    with pytest.raises(GraphContractError, match="media"):
        bind_denoising_model(ScriptedGraph(graph_capabilities=declaration))


def test_a_geometry_with_another_canvas_is_refused():
    with pytest.raises(GraphContractError, match="canvases of 8 positions, its geometry says 9"):
        bind_denoising_model(ScriptedGraph(geometry=replace(GEOMETRY, canvas_length=9)))


@pytest.mark.parametrize(
    "composition",
    [Composition(kv=AffineKv(bits=8, group_size=32)), Composition(paged_kv=PagedKvComposition())],
    ids=["quantized", "paged"],
)
def test_another_form_of_keys_and_values_is_refused(composition):
    with pytest.raises(ConfigurationError, match="kv_storage"):
        bind_denoising_model(ScriptedGraph(composition=composition))
