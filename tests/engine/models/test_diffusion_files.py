"""DiffusionGemma's weights: the forms in which they are stored, what is left out, and what is refused by name."""

import re

import mlx.core as mx
import pytest

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.execution.inspection import inspect_model
from tests.engine.models import tiny_diffusion, tiny_vision
from tests.engine.models.packed import relative_difference

EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\.weight")


def bare(tensors):
    """As the authors store a model: experts' matrices without an ending of their names."""
    return {
        name.removesuffix(".weight") if EXPERTS.fullmatch(name) else name: tensor for name, tensor in tensors.items()
    }


def stacked(tensors):
    """Gate and up apart, each stacked over the experts."""
    found = dict(tensors)
    for name in [name for name in tensors if "gate_up_proj" in name]:
        gate, up = mx.split(found.pop(name), 2, axis=1)
        found[name.replace("gate_up_proj", "gate_proj")] = gate
        found[name.replace("gate_up_proj", "up_proj")] = up
    return found


def single(tensors):
    """Every expert's matrices by themselves."""
    found = {}
    for name, tensor in stacked(tensors).items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        for expert in range(tensor.shape[0]):
            found[name.replace(".experts.", f".experts.{expert}.")] = tensor[expert]
    return found


def with_leftovers(tensors):
    """With what files may hold besides: a tied head, rotary tables, copies of the encoder, towers, clipping bounds."""
    zeros = mx.zeros((2, 2))
    return tensors | {
        "lm_head.weight": zeros,
        "model.decoder.rotary_emb.full_attention_inv_freq": zeros,
        "model.decoder.layers.0.self_attn.rotary_emb.inv_freq": zeros,
        "model.encoder.language_model.embed_tokens.weight": zeros,
        "model.encoder.language_model.layers.1.mlp.up_proj.weight": zeros,
        "model.encoder.vision_tower.patch_embedder.input_proj.weight": zeros,
        "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.input_max": zeros,
        "model.encoder.embed_vision.embedding_projection.weight": zeros,
        "model.decoder.layers.0.mlp.up_proj.output_min": zeros,
    }


@pytest.mark.parametrize("form", [bare, stacked, single, with_leftovers])
def test_every_form_of_storage_is_the_same_model(tmp_path, form):
    model = tiny_diffusion.build()
    tiny_diffusion.save(tmp_path / "converted", model)
    _, tensors = tiny_diffusion.save(tmp_path / "other", model, form=form)
    wanted, found = (
        tiny_diffusion.logits(graph, tiny_diffusion.ids(1, 16), tiny_diffusion.read(graph, [5, 6, 7]))
        for graph in (tiny_diffusion.graph(tmp_path / name) for name in ("converted", "other"))
    )
    assert tensors.keys() != tiny_diffusion.save(tmp_path / "converted", model)[1].keys()
    assert mx.array_equal(found, wanted).item()


def test_quantized_experts_may_be_stacked_too(tmp_path):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE)
    stated = tiny_diffusion.quantize(model)
    for name, form in (("fused", dict), ("stacked", stacked)):
        tiny_diffusion.save(tmp_path / name, model, form=form, quantization=stated)
    wanted, found = (
        tiny_diffusion.logits(graph, tiny_diffusion.ids(1, 16), tiny_diffusion.read(graph, [5, 6, 7]))
        for graph in (tiny_diffusion.graph(tmp_path / name, dequantize=False) for name in ("fused", "stacked"))
    )
    assert mx.array_equal(found, wanted).item()


def of_each_kind(tensors):
    """Names of which no two differ by the layer alone."""
    return list({re.sub(r"layers\.\d+", "#", name): name for name in tensors}.values())


def test_a_missing_tensor_is_named(tmp_path):
    config, tensors = tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    names = of_each_kind(tensors)
    assert len(names) >= 28
    for name in names:
        tiny_diffusion.write(tmp_path, config, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(MissingArtifactError, match=re.escape(name)):
            open_artifact(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    config, tensors = tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    for name in of_each_kind(tensors):
        tiny_diffusion.write(tmp_path, config, tensors | {name: mx.concatenate([tensors[name], tensors[name]])})
        with pytest.raises(CorruptArtifactError, match=rf"{re.escape(name)} has the shape"):
            open_artifact(tmp_path)


@pytest.mark.parametrize(
    "surplus",
    [
        "model.decoder.layers.1.self_attn.v_proj.weight",
        "model.decoder.layers.2.layer_scalar",
        "model.encoder.language_model.layers.2.layer_scalar",
        "model.decoder.layers.0.self_attn.sinks",
        "model.embed_tokens.weight",
    ],
)
def test_a_tensor_that_nothing_uses_is_named(tmp_path, surplus):
    config, tensors = tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    tiny_diffusion.write(tmp_path, config, tensors | {surplus: mx.zeros((2, 2))})
    with pytest.raises(UnsupportedArtifactError, match=rf"no use for: {re.escape(surplus)}"):
        tiny_diffusion.graph(tmp_path)
    assert any(surplus in problem for problem in inspect_model(str(tmp_path)).problems)


def test_a_bias_that_is_not_announced_is_named_and_one_that_is_must_be_there(tmp_path):
    config, tensors = tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    name = "model.decoder.layers.0.self_attn.q_proj.bias"
    tiny_diffusion.write(tmp_path, config, tensors | {name: mx.zeros((32,))})
    with pytest.raises(CorruptArtifactError, match=re.escape(f"has {name}, which the configuration does not announce")):
        open_artifact(tmp_path)
    announced = config | {"text_config": config["text_config"] | {"attention_bias": True}}
    tiny_diffusion.write(tmp_path, announced, tensors)
    with pytest.raises(MissingArtifactError, match=re.escape(name)):
        open_artifact(tmp_path)


def test_attention_with_biases_gives_mlx_vlms_logits(tmp_path):
    model = tiny_diffusion.build(attention_bias=True)
    tiny_diffusion.save(tmp_path, model)
    graph, oracle = tiny_diffusion.graph(tmp_path), tiny_diffusion.Oracle(model)
    found = tiny_diffusion.logits(graph, tiny_diffusion.ids(1, 16), tiny_diffusion.read(graph, [5, 6, 7]))
    assert relative_difference(found, oracle.logits(tiny_diffusion.ids(1, 16), oracle.read([5, 6, 7]))) < 1e-5


def quantized(tmp_path):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE)
    return tiny_diffusion.save(tmp_path, model, quantization=tiny_diffusion.quantize(model))


def test_a_quantized_matrix_whose_parts_are_missing_or_wrong_is_named(tmp_path):
    config, tensors = quantized(tmp_path)
    module = "model.decoder.layers.0.experts.gate_up_proj"
    for part in ("scales", "biases"):
        left = {name: tensor for name, tensor in tensors.items() if name != f"{module}.{part}"}
        tiny_diffusion.write(tmp_path, config, left)
        with pytest.raises(ArtifactError, match=re.escape(module)):
            open_artifact(tmp_path)
    tiny_diffusion.write(tmp_path, config | {"quantization": {"bits": 3, "group_size": 32}}, tensors)
    with pytest.raises(CorruptArtifactError, match="does not fit affine 3-bit, groups of 32"):
        open_artifact(tmp_path)


def test_an_override_that_names_no_module_is_refused(tmp_path):
    config, tensors = quantized(tmp_path)
    stated = config["quantization"] | {"model.decoder.layers.7.mlp.up_proj": {"bits": 8, "group_size": 32}}
    tiny_diffusion.write(tmp_path, config | {"quantization": stated}, tensors)
    with pytest.raises(CorruptArtifactError, match=r"quantization names 'model\.decoder\.layers\.7\.mlp\.up_proj'"):
        open_artifact(tmp_path)


def test_weights_that_are_cut_off_are_refused_by_file(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors"):
        open_artifact(tmp_path)


def test_inspection_explains_the_method_the_canvas_and_every_layer(tmp_path):
    quantized(tmp_path)
    report = inspect_model(str(tmp_path))
    assert (report.declaration.method, report.model_type, report.experts, report.experts_per_token) == (
        "denoising",
        "diffusion_gemma",
        4,
        2,
    )
    assert report.rotations == ("default", "proportional")
    assert report.geometry.layer_types == ("sliding_attention", "full_attention")
    assert report.geometry.canvas_length == 16
    assert any("reads no images" in note for note in report.notes)
    forms = {(form.module, form.form): form.layers for form in report.storage.forms}
    assert forms["decoder.embed_tokens", "affine 8-bit, groups of 32"] == ""
    assert forms["experts.gate_up_proj", "affine 4-bit, groups of 32"] == "0-1"
    assert report.memory.token_bytes > 0


def test_a_tower_that_is_missing_in_part_or_misshapen_is_named(tmp_path):
    config, tensors = tiny_vision.save(tmp_path, tiny_vision.build({"standardize": True, "use_clipped_linears": True}))
    names = [name for name in of_each_kind(tensors) if "vision" in name]
    assert len(names) == 5 + 4 + 2 + 7 * 5
    for name in names[::3]:
        tiny_diffusion.write(tmp_path, config, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(MissingArtifactError, match=re.escape(name)):
            open_artifact(tmp_path)
        tiny_diffusion.write(tmp_path, config, tensors | {name: mx.zeros((3, 5))})
        with pytest.raises(CorruptArtifactError, match=rf"{re.escape(name)} has the shape"):
            open_artifact(tmp_path)


def test_what_a_tower_has_no_use_for_is_named_but_for_bounds_that_it_does_not_keep(tmp_path):
    bounds = {
        name.replace(".linear.weight", ".input_max"): mx.array(1.0)
        for name in tiny_vision.save(tmp_path, tiny_vision.build())[1]
        if name.endswith(".linear.weight")
    }
    assert len(bounds) == 14
    tiny_vision.save(tmp_path, tiny_vision.build(), form=lambda tensors: tensors | bounds)
    tiny_diffusion.graph(tmp_path)
    surplus = {"model.encoder.vision_tower.std_bias": mx.zeros((24,))}
    tiny_vision.save(tmp_path, tiny_vision.build(), form=lambda tensors: tensors | surplus)
    with pytest.raises(UnsupportedArtifactError, match=r"no use for: model\.encoder\.vision_tower\.std_bias"):
        tiny_diffusion.graph(tmp_path)
    assert any("std_bias" in problem for problem in inspect_model(str(tmp_path)).problems)


def test_a_model_is_inspected_with_its_tower_and_its_bytes_are_predicted(tmp_path):
    tiny_vision.save(tmp_path / "seeing", tiny_vision.build())
    tiny_diffusion.save(tmp_path / "blind", tiny_diffusion.build())
    seeing, blind = (inspect_model(str(tmp_path / name)) for name in ("seeing", "blind"))
    assert (seeing.declaration.media.input, blind.declaration.media) == ("pixels", None)
    assert [any("no images" in note for note in report.notes) for report in (seeing, blind)] == [False, True]
    stored = mx.load(str(tmp_path / "seeing" / "model.safetensors"))
    tower = sum(tensor.nbytes for name, tensor in stored.items() if "vision" in name)
    assert seeing.memory.weights_bytes - blind.memory.weights_bytes == tower
    resident = [tiny_diffusion.graph(tmp_path / name).weights_bytes for name in ("seeing", "blind")]
    assert resident[0] - resident[1] == tower
