"""The weight store: exact values from every format, each tensor once, and nothing left over."""

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import DenseTensor, QuantizedTensor, WeightStore, dense
from engine.contracts.errors import (
    CorruptArtifactError,
    GraphContractError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.artifacts.tiny_files import llama_tensors, write_folder, write_shards

QUERY = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
FOUR_BITS = {"bits": 4, "group_size": 32}


def take_all(artifact):
    store = WeightStore(artifact)
    weights = [name for name in artifact.tensors if not name.endswith((".scales", ".biases"))]
    found = {name: store.take(name) for name in weights}
    store.audit()
    return found


def quantized(tensors, schemes, default=None):
    """`tensors` with matrices packed by mlx: each module in `schemes` its own way, the others by `default`."""
    stored = {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        scheme = schemes.get(module, default) if values.ndim > 1 else None
        if not scheme:
            stored[name] = values
            continue
        parts = mx.quantize(mx.array(values), **scheme)
        for suffix, part in zip(("weight", "scales", "biases"), parts, strict=False):
            stored[f"{module}.{suffix}"] = np.array(part)
    return stored


# Safetensors


def test_a_single_file_gives_its_values_bit_for_bit(tmp_path):
    tensors = llama_tensors()
    found = take_all(open_artifact(write_folder(tmp_path, tensors)))
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(np.array(found[name].weight), values) for name, values in tensors.items())


def test_shards_give_the_same_values_as_one_file(tmp_path):
    tensors = llama_tensors()
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, tensors)
    found = take_all(open_artifact(tmp_path))
    assert all(np.array_equal(np.array(found[name].weight), values) for name, values in tensors.items())


def test_a_file_that_shrinks_after_its_header_was_read_is_refused_by_name(tmp_path):
    artifact = open_artifact(write_folder(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    store = WeightStore(artifact)
    with pytest.raises(CorruptArtifactError, match=r"^model.safetensors: .* cannot be read any more"):
        for name in artifact.tensors:
            store.take(name)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.bool_])
@pytest.mark.parametrize("name", [f"{DOWN}.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_whole_numbers_without_scales_are_refused_by_tensor_and_dtype(tmp_path, name, dtype):
    tensors = llama_tensors()
    tensors[name] = tensors[name].astype(dtype)
    spelled = {"b": "BOOL", "i": "I", "u": "U"}[np.dtype(dtype).kind]
    with pytest.raises(UnsupportedArtifactError, match=rf"/model.safetensors: {name} is stored as {spelled}\d*,"):
        open_artifact(write_folder(tmp_path, tensors))


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_scales_of_whole_numbers_are_refused_by_tensor_and_dtype(tmp_path, part):
    tensors = quantized(llama_tensors(), {QUERY: FOUR_BITS})
    tensors[f"{QUERY}.{part}"] = tensors[f"{QUERY}.{part}"].astype(np.int32)
    folder = write_folder(tmp_path, tensors, config={"quantization": FOUR_BITS})
    with pytest.raises(UnsupportedArtifactError, match=rf"{QUERY}.{part} is stored as I32,"):
        open_artifact(folder)


# Accounting


def test_a_missing_tensor_is_named_and_optional_ones_are_none(tmp_path):
    store = WeightStore(open_artifact(write_folder(tmp_path)))
    assert store.take_optional(f"{QUERY}.bias") is None
    with pytest.raises(MissingArtifactError, match=f"has no {QUERY}.bias"):
        store.take(f"{QUERY}.bias")


def test_required_names_are_listed_up_to_twelve(tmp_path):
    store = WeightStore(open_artifact(write_folder(tmp_path)))
    store.require([f"{QUERY}.weight"])
    with pytest.raises(MissingArtifactError, match=r"has no x0, x1, .*x11 and 3 more$"):
        store.require([f"{QUERY}.weight", *(f"x{index}" for index in range(15))])


def test_a_tensor_can_be_taken_once(tmp_path):
    store = WeightStore(open_artifact(write_folder(tmp_path)))
    store.take(f"{QUERY}.weight")
    assert store.has(f"{QUERY}.weight")
    with pytest.raises(GraphContractError, match="twice"):
        store.take(f"{QUERY}.weight")


def test_another_shape_than_the_graph_needs_is_refused_with_both(tmp_path):
    store = WeightStore(open_artifact(write_folder(tmp_path)))
    with pytest.raises(
        CorruptArtifactError, match=r"q_proj.weight has the shape \[64, 64\], the model needs \[64, 32\]"
    ):
        store.take(f"{QUERY}.weight", (64, 32))
    assert store.take(f"{QUERY}.weight", (64, 64)).weight.shape == (64, 64)


def test_the_audit_lists_up_to_twelve_tensors_without_use(tmp_path):
    extra = {f"extra.{index:02}": np.zeros(2, np.float32) for index in range(14)}
    artifact = open_artifact(write_folder(tmp_path, llama_tensors() | extra))
    store = WeightStore(artifact)
    for name in llama_tensors():
        store.take(name)
    with pytest.raises(UnsupportedArtifactError, match=r"no use for: extra.00, .*extra.11 and 2 more"):
        store.audit()
    store.audit(extra_drops=[r"extra\.\d+"])


def test_rotary_tables_are_dropped(tmp_path):
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    assert "model.norm.weight" in take_used(open_artifact(write_folder(tmp_path, llama_tensors() | tables)))


def take_used(artifact):
    """Take what a llama graph takes, and audit."""
    store = WeightStore(artifact)
    names = [*llama_tensors(), *([] if artifact.config.tie_word_embeddings else ["lm_head.weight"])]
    found = {name: store.take(name) for name in names}
    store.audit()
    return found


# Tied and untied output heads


@pytest.mark.parametrize(
    ("flag", "head", "tied"),
    [(True, False, True), (True, True, True), (False, True, False), (None, False, True), (None, True, False)],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_head_is_tied_as_stated_and_as_stored_where_nothing_is_stated(tmp_path, flag, head, tied, nested):
    config = {"text_config": {"tie_word_embeddings": flag}} if nested else {"tie_word_embeddings": flag}
    artifact = open_artifact(write_folder(tmp_path, head=head, config=config))
    assert artifact.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in take_used(artifact)) is not tied


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    with pytest.raises(MissingArtifactError, match=r"has no lm_head.weight, and the configuration does not tie"):
        open_artifact(write_folder(tmp_path, config={"tie_word_embeddings": False}))


def test_a_quantized_head_of_a_tied_model_is_dropped_whole(tmp_path):
    stored = quantized(llama_tensors(head=True), {"lm_head": FOUR_BITS, "model.embed_tokens": FOUR_BITS})
    config = {"tie_word_embeddings": True, "quantization": FOUR_BITS}
    found = take_used(open_artifact(write_folder(tmp_path, stored, config=config)))
    assert isinstance(found["model.embed_tokens.weight"], QuantizedTensor)


# Quantized safetensors


MIXED = {
    QUERY: {"bits": 6, "group_size": 32},
    "model.layers.1.self_attn.q_proj": None,
    DOWN: {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "model.layers.1.mlp.up_proj": {"bits": 3, "group_size": 64},
}


def write_mixed(folder, **overrides):
    config = FOUR_BITS | {module: scheme or False for module, scheme in MIXED.items()} | overrides
    return write_folder(folder, quantized(llama_tensors(), MIXED, FOUR_BITS), config={"quantization": config})


def test_every_layer_is_read_at_its_own_width(tmp_path):
    found = take_all(open_artifact(write_mixed(tmp_path)))
    for name, values in llama_tensors().items():
        module = name.removesuffix(".weight")
        scheme = MIXED.get(module, FOUR_BITS) if values.ndim > 1 else None
        if not scheme:
            assert np.array_equal(np.array(found[name].weight), values)
            continue
        assert (found[name].bits, found[name].group_size) == (scheme["bits"], scheme["group_size"])
        expected = mx.dequantize(*mx.quantize(mx.array(values), **scheme), **scheme)
        assert mx.array_equal(dense(found[name]), expected.astype(mx.float32)), module


def test_parameters_count_values_and_not_words(tmp_path):
    artifact = open_artifact(write_mixed(tmp_path))
    assert artifact.parameters == sum(values.size for values in llama_tensors().values())
    assert artifact.weights_bytes < 4 * artifact.parameters
    assert artifact.stored_quantization == "affine 4-bit, groups of 32"


FAULTS = {
    "typo": ({"model.layers.0.self_attn.q_prj": {"bits": 6}}, "'model.layers.0.self_attn.q_prj', which is no module"),
    "typo of an exemption": ({"model.layers.9.mlp.up_proj": False}, "'model.layers.9.mlp.up_proj', which is no module"),
    "exemption of a packed layer": ({QUERY: False}, f"{QUERY} is stated not to be quantized"),
    "width of a dense layer": ({"model.layers.1.self_attn.q_proj": {"bits": 4}}, "stored without scales"),
    "another width": ({QUERY: {"bits": 4, "group_size": 32}}, f"{QUERY} does not fit affine 4-bit"),
    "another group": ({QUERY: {"bits": 6, "group_size": 64}}, f"{QUERY} does not fit affine 6-bit"),
    "another mode": ({DOWN: {"mode": "affine", "bits": 4, "group_size": 32}}, f"{DOWN} is not stored as affine"),
    "mode without biases": ({QUERY: {"mode": "mxfp8"}}, f"{QUERY} is not stored as mxfp8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_quantization_that_is_not_the_stored_one_is_refused_with_the_layer(tmp_path, fault):
    overrides, message = FAULTS[fault]
    with pytest.raises(CorruptArtifactError, match=message):
        open_artifact(write_mixed(tmp_path, **overrides))


def test_scales_without_a_stated_quantization_are_refused_with_the_layer(tmp_path):
    stored = quantized(llama_tensors(), {QUERY: FOUR_BITS})
    with pytest.raises(CorruptArtifactError, match=f"{QUERY} is quantized, and config.json has no quantization"):
        open_artifact(write_folder(tmp_path, stored))


def test_an_additive_bias_that_nothing_announces_is_refused(tmp_path):
    tensors = llama_tensors() | {f"{QUERY}.bias": np.zeros(64, np.float32)}
    with pytest.raises(CorruptArtifactError, match=f"has {QUERY}.bias, which the configuration does not announce"):
        open_artifact(write_folder(tmp_path, tensors))


def test_announced_biases_must_be_there(tmp_path):
    with pytest.raises(MissingArtifactError, match=f"has no {QUERY}.bias, "):
        open_artifact(write_folder(tmp_path, config={"attention_bias": True}))


def test_sixteen_bit_scales_are_widened_before_they_multiply(tmp_path):
    values = mx.random.normal((64, 64), key=mx.random.key(0)).astype(mx.float16)
    weight, scales, biases = mx.quantize(values, **FOUR_BITS)
    packed = QuantizedTensor(weight=weight, scales=scales, biases=biases, bits=4, group_size=32)
    levels = np.array(weight).view(np.uint8)
    levels = np.stack([levels & 15, levels >> 4], -1).reshape(64, 2, 32).astype(np.float32)
    wide_scales, wide_biases = (np.array(part).astype(np.float32)[..., None] for part in (scales, biases))
    assert np.array_equal(np.array(dense(packed)), (levels * wide_scales + wide_biases).reshape(64, 64))


def test_a_dense_tensor_is_cast_to_the_dtype_that_was_asked_for():
    half = DenseTensor(weight=mx.array([1.5, -2.0], dtype=mx.bfloat16))
    assert dense(half).dtype == mx.float32
    assert dense(half, mx.float16).dtype == mx.float16
    assert dense(half).tolist() == [1.5, -2.0]


def test_weights_bytes_come_from_headers_alone(tmp_path):
    artifact = open_artifact(write_folder(tmp_path))
    assert WeightStore(artifact).weights_bytes == sum(values.nbytes for values in llama_tensors().values())
    stored = {name: values.astype(np.float16) for name, values in llama_tensors().items()}
    save_file(stored, tmp_path / "model.safetensors")
    assert open_artifact(tmp_path).weights_bytes == artifact.weights_bytes // 2
