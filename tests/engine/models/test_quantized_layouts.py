"""Every layout that MLX quantizes to, packed and unpacked, against mlx-lm's own loading of the same folder."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model, quantize_model

from engine.contracts.errors import UnsupportedArtifactError
from engine.contracts.graph import PackedSegment
from engine.models import reading
from engine.ops.linear import multiplies_packed
from tests.engine.models import tiny_families, tiny_llama

CONFIG = tiny_llama.PLAIN | {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 96}
AFFINE = [{"bits": bits, "group_size": size, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
OTHERS = [
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]
PROMPT = [5, 17, 80, 3, 44, 9, 61]


def save(folder, schemes, default, *, tied, dtype=mx.float32):
    """A seeded llama whose modules are stored as `schemes` say, the others as `default`."""
    config = CONFIG | {"tie_word_embeddings": tied}
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)

    def scheme_of(path, module):
        return schemes.get(path, default) if isinstance(module, nn.Linear | nn.Embedding) else False

    nn.quantize(model, class_predicate=scheme_of)
    stated = default | {path: scheme or False for path, scheme in schemes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization": stated}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def logits(folder, *, dequantize, dtype="float32"):
    binding = tiny_llama.bind(folder, dequantize=dequantize, dtype=dtype)
    tokens = mx.array([PROMPT], dtype=mx.uint32)
    hidden = binding.hidden(tokens, [PackedSegment(len(PROMPT), binding.make_cache())])
    return np.array(binding.project(hidden)[0].astype(mx.float32))


def oracle_logits(folder):
    model, _ = load_model(folder)
    return np.array(model(mx.array([PROMPT]))[0].astype(mx.float32))


def assert_equal(found, expected):
    scale = np.abs(expected).max()
    assert scale > 0.05
    assert np.abs(found - expected).max() <= 1e-5 * scale
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scheme", [*AFFINE, *OTHERS], ids=lambda scheme: "-".join(map(str, scheme.values())))
def test_a_layout_gives_mlx_lms_logits_packed_and_unpacked(tmp_path, scheme, tied):
    if not multiplies_packed(**scheme):
        pytest.skip(f"the installed mlx does not multiply by {scheme} here")
    folder = save(tmp_path / "m", {}, scheme, tied=tied)
    expected = oracle_logits(folder)
    assert_equal(logits(folder, dequantize=False), expected)
    assert_equal(logits(folder, dequantize=True), expected)


MIXED = {
    "model.embed_tokens": {"bits": 6, "group_size": 64, "mode": "affine"},
    "model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 128, "mode": "affine"},
    "model.layers.0.self_attn.k_proj": False,
    "model.layers.0.mlp.gate_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "model.layers.1.mlp.down_proj": {"bits": 3, "group_size": 32, "mode": "affine"},
    "model.layers.1.self_attn.o_proj": False,
}


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("head", [None, False, {"bits": 8, "group_size": 32, "mode": "affine"}])
def test_single_layers_have_forms_of_their_own(tmp_path, head, dequantize):
    schemes = MIXED if head is None else MIXED | {"lm_head": head}
    folder = save(tmp_path / "m", schemes, AFFINE[6], tied=head is None)
    assert_equal(logits(folder, dequantize=dequantize), oracle_logits(folder))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bit_scales_keep_their_dtype_where_the_layout_keeps_it(tmp_path, dtype):
    folder = save(tmp_path / "m", {}, {"bits": 4, "group_size": 64, "mode": "affine"}, tied=True, dtype=dtype)
    name = {mx.bfloat16: "bfloat16", mx.float16: "float16"}[dtype]
    found, expected = logits(folder, dequantize=False, dtype=name), oracle_logits(folder)
    assert np.abs(found - expected).max() <= (0.03 if name == "bfloat16" else 0.004) * np.abs(expected).max()


def test_a_form_without_a_kernel_is_refused_by_name_and_can_still_be_unpacked(tmp_path, monkeypatch):
    folder = save(tmp_path / "m", {}, AFFINE[0], tied=True)
    monkeypatch.setattr(reading, "multiplies_packed", lambda *form: form[0] != 2)
    with pytest.raises(UnsupportedArtifactError, match="affine 2-bit, groups of 32, are of a form that"):
        logits(folder, dequantize=False)
    assert_equal(logits(folder, dequantize=True), oracle_logits(folder))


def test_what_the_library_has_no_product_for_is_told():
    assert multiplies_packed(4, 64, "affine")
    assert not multiplies_packed(7, 64, "affine")
    assert not multiplies_packed(4, 64, "nothing")


@pytest.mark.parametrize("scheme", [AFFINE[6], *OTHERS], ids=lambda scheme: scheme["mode"])
def test_experts_that_mlx_lm_converts_are_read_with_the_routers_own_scheme(tmp_path, scheme):
    config = tiny_families.config_of("qwen3_moe", next(iter(tiny_families.FAMILIES["qwen3_moe"].cases.values())))
    model, stated = quantize_model(tiny_families.build("qwen3_moe", config), config, **scheme)
    assert any(isinstance(value, dict) and "mode" not in value for value in stated["quantization"].values())
    (tmp_path / "config.json").write_text(json.dumps(stated))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    assert_equal(logits(tmp_path, dequantize=True), oracle_logits(tmp_path))
