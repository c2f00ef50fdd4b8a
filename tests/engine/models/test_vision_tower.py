"""Images in DiffusionGemma: what the tower sees, prompts that hold it, and canvases after them, as mlx-vlm's."""

import mlx.core as mx
import pytest

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import GraphContractError
from engine.execution.inspection import inspect_model
from tests.engine.models import tiny_diffusion, tiny_vision
from tests.engine.models.packed import relative_difference


@pytest.mark.parametrize("changes", tiny_vision.SHAPES.values(), ids=tiny_vision.SHAPES)
def test_a_tower_sees_what_mlx_vlms_sees(tmp_path, changes):
    model = tiny_vision.build(changes)
    tiny_vision.save(tmp_path, model)
    for how in ({"library_arithmetic": True}, {"pretranspose": True}):
        graph = tiny_diffusion.graph(tmp_path, **how)
        for seed, size in enumerate([(24, 16), (100, 31), (9, 40), (8, 8)]):
            image = tiny_vision.picture(seed, *size)
            wanted = tiny_vision.seen_by(model, image)
            found = graph._tower(tiny_vision.prompt_image(tmp_path, image).pixels)[0]
            assert found.shape == wanted.shape
            assert relative_difference(found, wanted) < 1e-5
    assert mx.abs(wanted).max().item() > 0.01


def test_bounds_of_products_change_what_is_seen(tmp_path):
    """Else the case above would prove nothing of them."""
    image = tiny_vision.picture(1)
    free, clipped = (tiny_vision.seen_by(tiny_vision.build({"use_clipped_linears": clips}), image) for clips in (0, 1))
    assert relative_difference(clipped, free) > 0.01


def test_the_places_of_patches_and_every_pixel_count(tmp_path):
    model = tiny_vision.build()
    tiny_vision.save(tmp_path, model)
    graph = tiny_diffusion.graph(tmp_path)
    seen = tiny_vision.prompt_image(tmp_path, tiny_vision.picture(3))
    first = graph._tower(seen.pixels)
    turned = graph._tower(seen.pixels[::-1, ::-1].copy())
    assert relative_difference(turned, first) > 0.01
    for place in [(0, 0, 0), (15, 23, 2), (7, 11, 1)]:
        other = seen.pixels.copy()
        other[place] ^= 255
        assert not mx.array_equal(graph._tower(other), first).item()


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("how", [{"library_arithmetic": True}, {}], ids=["library", "composed"])
def test_canvases_after_a_prompt_with_images_have_mlx_vlms_logits(tmp_path, how, both_ways):
    text = {"use_bidirectional_attention": "vision" if both_ways else None}
    model = tiny_vision.build(scale=3.0, **text)
    tiny_vision.save(tmp_path, model)
    if not both_ways:
        config, tensors = tiny_vision.save(tmp_path, model)
        config["text_config"]["use_bidirectional_attention"] = None
        tiny_diffusion.write(tmp_path, config, tensors)
    graph, oracle = tiny_diffusion.graph(tmp_path, **how), tiny_diffusion.Oracle(model)
    images = [tiny_vision.picture(1, 24, 16), tiny_vision.picture(2, 16, 60)]
    ids, state = tiny_vision.read(tmp_path, graph, images)
    caches = tiny_vision.oracle_caches(model, ids, images)
    assert len(ids) > 2 * tiny_diffusion.WINDOW
    signal = feedback = None
    for seed in range(3):
        canvas = tiny_diffusion.ids(seed, tiny_diffusion.CANVAS)
        wanted, found = oracle.logits(canvas, caches, signal), tiny_diffusion.logits(graph, canvas, state, feedback)
        assert relative_difference(found, wanted) < 1e-5
        signal, feedback = oracle.feedback(wanted), tiny_diffusion.fed_back(graph, wanted)
    model.diffusion_update_cache(mx.array([canvas]), cache=caches)
    graph.extend_prefill(mx.array([canvas]), state)
    assert relative_difference(tiny_diffusion.logits(graph, canvas, state), oracle.logits(canvas, caches)) < 1e-5


def test_the_tokens_of_an_image_see_each_other_whichever_comes_first(tmp_path):
    """Else causal masks would have passed: the last pixel changes what the first token of its image leaves behind."""
    tiny_vision.save(tmp_path, tiny_vision.build())
    graph = tiny_diffusion.graph(tmp_path)
    image = tiny_vision.picture(5)
    changed = image.copy()
    changed.putpixel((23, 15), tuple(255 - value for value in image.getpixel((23, 15))))
    keys = []
    for one in (image, changed):
        _, state = tiny_vision.read(tmp_path, graph, [one, one], cuts=())
        keys.append(state.arrays()[2])  # the full layer's
    start = len(tiny_vision.TEXTS[0]) + 1
    assert mx.array_equal(keys[0][:, :, :start], keys[1][:, :, :start]).item()
    assert not mx.array_equal(keys[0][:, :, start], keys[1][:, :, start]).item()


@pytest.mark.parametrize("cuts", [(5,), (6, 12), (3, 13, 14), (17, 25)], ids=str)
def test_a_prompt_that_is_cut_beside_its_images_is_the_same_prompt(tmp_path, cuts):
    tiny_vision.save(tmp_path, tiny_vision.build())
    graph = tiny_diffusion.graph(tmp_path)
    images = [tiny_vision.picture(1), tiny_vision.picture(2)]
    canvas = tiny_diffusion.ids(0, 16)
    whole, parts = (
        tiny_diffusion.logits(graph, canvas, tiny_vision.read(tmp_path, graph, images, cuts=ends)[1])
        for ends in ((), cuts)
    )
    assert relative_difference(parts, whole) < 1e-5


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_quantized_tower_sees_what_mlx_vlms_sees(tmp_path, packed):
    model = tiny_vision.build(tiny_vision.WIDE, **tiny_diffusion.WIDE)
    image = tiny_vision.picture(1)
    dense = tiny_vision.seen_by(model, image)
    mx.eval(dense)
    stated = tiny_diffusion.quantize(model, keep=("patch_embedder",))
    _, tensors = tiny_vision.save(tmp_path, model, quantization=stated)
    module = "model.encoder.vision_tower.encoder.layers.1.self_attn.q_proj.linear"
    assert {f"{module}.scales", "model.encoder.embed_vision.embedding_projection.scales"} <= tensors.keys()
    wanted = tiny_vision.seen_by(model, image)
    assert relative_difference(wanted, dense) > 1e-3
    graph = tiny_diffusion.graph(tmp_path, dequantize=not packed)
    found = graph._tower(tiny_vision.prompt_image(tmp_path, image).pixels)[0]
    assert relative_difference(found, wanted) < 1e-5


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_quantized_projection_of_patches_takes_whole_numbers_as_mlx_vlms_does(tmp_path, packed):
    """So the reference asks; it leaves little of an image, and inspecting the model says so."""
    model = tiny_vision.build(tiny_vision.WIDE | {"patch_size": 8}, **tiny_diffusion.WIDE)
    tiny_vision.save(tmp_path, model, quantization=tiny_diffusion.quantize(model))
    bright, dim = (
        tiny_vision.picture(1, 48, 32).point(lambda value, least=least: least + value // 4) for least in (64, 128)
    )
    wanted = tiny_vision.seen_by(model, bright)
    graph = tiny_diffusion.graph(tmp_path, dequantize=not packed)
    found, other = (graph._tower(tiny_vision.prompt_image(tmp_path, image).pixels)[0] for image in (bright, dim))
    assert relative_difference(found, wanted) < 1e-5
    assert mx.array_equal(found, other).item()
    assert any("sees little of an image" in note for note in inspect_model(str(tmp_path)).notes)


def test_a_graph_with_a_tower_declares_pixels_and_one_without_takes_none(tmp_path):
    tiny_vision.save(tmp_path / "seeing", tiny_vision.build())
    tiny_diffusion.save(tmp_path / "blind", tiny_diffusion.build())
    seeing, blind = (tiny_diffusion.graph(tmp_path / name) for name in ("seeing", "blind"))
    media = seeing.graph_capabilities.media
    assert (media.input, media.video) == ("pixels", False)
    assert seeing.geometry.vision == open_artifact(tmp_path / "seeing").config.vision.geometry
    assert (blind.graph_capabilities.media, blind.geometry.vision) == (None, None)
    image = tiny_vision.prompt_image(tmp_path / "seeing", tiny_vision.picture(1))
    with pytest.raises(GraphContractError, match="has no tower"):
        blind.prefill(mx.array([[1] * image.tokens]), (), [image])


def test_adapters_change_nothing_of_the_tower(tmp_path):
    tiny_vision.save(tmp_path, tiny_vision.build())
    graph = tiny_diffusion.graph(tmp_path, adapters=True)
    assert graph.adapters.targets
    assert not [target for target in graph.adapters.targets if "vision" in target]
