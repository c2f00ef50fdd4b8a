"""Binding a graph to the denoising method: what is refused, and what is fixed."""

from dataclasses import replace

import pytest

from engine.contracts.composition import Composition, PagedKvComposition
from engine.contracts.errors import ConfigurationError, GraphContractError
from engine.contracts.graph import GraphDeclaration, GraphDescriptor, MediaCapability
from engine.contracts.kv_scheme import AffineKv
from engine.contracts.vision import VisionGeometry
from engine.generation.bindings.denoising import OPERATIONS, bind_denoising_model
from tests.engine.generation.scripted_denoiser import DECLARATION, GEOMETRY, ScriptedGraph

SEEING = replace(
    GEOMETRY,
    vision=VisionGeometry(
        hidden_size=8,
        intermediate_size=8,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=8,
        patch_pixels=2,
        pooling=2,
        most_tokens=4,
    ),
)


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


@pytest.mark.parametrize(
    "media", [MediaCapability(input="embeddings"), MediaCapability(input="pixels", video=True)], ids=["form", "video"]
)
def test_media_that_the_method_does_not_give_are_refused(media):
    declaration = replace(DECLARATION, media=media)
    with pytest.raises(GraphContractError, match="media in a form"):
        bind_denoising_model(ScriptedGraph(graph_capabilities=declaration, geometry=SEEING))


def test_images_and_the_sizes_of_a_tower_are_declared_together_or_not_at_all():
    declaration = replace(DECLARATION, media=MediaCapability(input="pixels"))
    bind_denoising_model(ScriptedGraph(graph_capabilities=declaration, geometry=SEEING))
    for half in ({"graph_capabilities": declaration}, {"geometry": SEEING}):
        with pytest.raises(GraphContractError, match="sizes of a tower"):
            bind_denoising_model(ScriptedGraph(**half))


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
