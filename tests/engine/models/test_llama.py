"""The packed llama graph against mlx-lm on the same weights.

With the stored layout and the library's own functions the order of operations is mlx-lm's, and the bits are too; a
transposed layout, a BLAS that splits a fused product elsewhere, or exponentials composed from powers change the
rounding, and stay within `ROUNDING` of logits of magnitude 3.
"""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from engine.contracts.graph import (
    AdapterCapability,
    GraphDeclaration,
    KvCapability,
    PackedSegment,
    SpeculationCapability,
)
from tests.engine.models import tiny_llama

ROUNDING = 5e-6

VARIANTS = {
    "grouped query attention": {},
    "multi-head attention": {"num_key_value_heads": 4},
    "multi-query attention": {"num_key_value_heads": 1},
    "untied head": {"tie_word_embeddings": False},
    "attention and mlp biases": {"attention_bias": True, "mlp_bias": True},
    "own head size": {"head_dim": 32},
    "interleaved rope": {"rope_traditional": True},
    "rope base": {"rope_theta": 100000.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + step / 4 for step in range(8)],
        }
    },
}


def packed_logits(binding, prompts):
    """Logits of every position: the prompts' heads packed into one step, then their last tokens in another."""
    caches = [binding.make_cache() for _ in prompts]

    def forward(parts):
        tokens = mx.array([[token for part in parts for token in part]], dtype=mx.uint32)
        segments = [PackedSegment(len(part), cache) for part, cache in zip(parts, caches, strict=True)]
        flat = binding.project(binding.hidden(tokens, segments))[0]
        bounds = [sum(len(part) for part in parts[: index + 1]) for index in range(len(parts) - 1)]
        return mx.split(flat, bounds, axis=0) if bounds else [flat]

    heads = forward([prompt[:-1] for prompt in prompts])
    tails = forward([prompt[-1:] for prompt in prompts])
    return [mx.concatenate(pair, axis=0) for pair in zip(heads, tails, strict=True)]


@pytest.mark.parametrize("pretranspose", [False, True], ids=["stored layout", "transposed layout"])
@pytest.mark.parametrize("library_arithmetic", [False, True], ids=["composed", "library"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_packed_logits_equal_mlx_lms(tmp_path, changes, library_arithmetic, pretranspose, bundled_blas):
    oracle = tiny_llama.write(tmp_path, **changes)
    binding = tiny_llama.bind(tmp_path, pretranspose=pretranspose, library_arithmetic=library_arithmetic)
    prompt = tiny_llama.random_prompt(1, 40)
    found, wanted = packed_logits(binding, [prompt])[0], oracle.logits(prompt)
    assert mx.abs(wanted).max().item() > 0.1
    assert mx.abs(found - wanted).max().item() < ROUNDING
    if bundled_blas and library_arithmetic and not pretranspose:
        assert mx.array_equal(found, wanted).item()


def test_rows_packed_together_equal_each_alone(tmp_path):
    oracle = tiny_llama.write(tmp_path)
    binding = tiny_llama.bind(tmp_path)
    prompts = [tiny_llama.random_prompt(seed, length) for seed, length in ((1, 40), (2, 17), (3, 2), (4, 33))]
    for prompt, found in zip(prompts, packed_logits(binding, prompts), strict=True):
        assert mx.abs(found - oracle.logits(prompt)).max().item() < ROUNDING


def test_sliding_windows_equal_mlx_lms_rotating_cache(tmp_path):
    oracle = tiny_llama.write(tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    binding = tiny_llama.bind(tmp_path)
    prompt = tiny_llama.random_prompt(5, 60)
    found = packed_logits(binding, [prompt])[0]
    assert mx.abs(found - oracle.logits(prompt)).max().item() < ROUNDING


def test_sliding_windows_change_the_result(tmp_path):
    tiny_llama.write(tmp_path / "full")
    tiny_llama.write(tmp_path / "sliding", layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    prompt = tiny_llama.random_prompt(5, 60)
    full, sliding = (packed_logits(tiny_llama.bind(tmp_path / name), [prompt])[0] for name in ("full", "sliding"))
    assert mx.abs(full[:16] - sliding[:16]).max().item() < ROUNDING
    assert mx.abs(full[30:] - sliding[30:]).max().item() > 1e-3


def test_mistral_sees_its_window_alone(tmp_path):
    """In one layer the last token sees a window; rotation is relative, so that window alone gives the same logits."""
    oracle = tiny_llama.write(tmp_path, num_hidden_layers=1)
    config = tiny_llama.PLAIN | {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = tiny_llama.random_prompt(5, 60)
    found = packed_logits(tiny_llama.bind(tmp_path), [prompt])[0][-1]
    assert mx.abs(found - oracle.logits(prompt[-8:])[-1]).max().item() < ROUNDING
    assert mx.abs(found - oracle.logits(prompt)[-1]).max().item() > 1e-3


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_half_precision_files_are_held_exactly_in_float32(tmp_path, dtype):
    oracle = tiny_llama.write(tmp_path, dtype=dtype)
    oracle.model.set_dtype(mx.float32)
    prompt = tiny_llama.random_prompt(1, 30)
    found = packed_logits(tiny_llama.bind(tmp_path), [prompt])[0]
    assert mx.abs(found - oracle.logits(prompt)).max().item() < ROUNDING


def test_a_graph_accounts_for_the_bytes_it_holds(tmp_path):
    oracle = tiny_llama.write(tmp_path, tie_word_embeddings=False)
    held = sum(array.nbytes for _, array in tree_flatten(oracle.model.parameters()))
    assert tiny_llama.bind(tmp_path).weights_bytes == held


@pytest.mark.parametrize("pretranspose", [False, True])
def test_a_packed_table_that_is_the_head_too_counts_once(tmp_path, pretranspose):
    oracle = tiny_llama.write(tmp_path)
    nn.quantize(oracle.model, group_size=32, bits=4)
    stored = dict(tree_flatten(oracle.model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    config = tiny_llama.PLAIN | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    binding = tiny_llama.bind(tmp_path, dequantize=False, pretranspose=pretranspose)
    assert binding.weights_bytes == sum(array.nbytes for array in stored.values())


def test_a_graph_promises_nothing_that_a_request_is_refused(tmp_path):
    """Speculation is refused by name, so it is not declared either."""
    tiny_llama.write(tmp_path)
    nothing = dict.fromkeys(SpeculationCapability.__dataclass_fields__, False)
    assert tiny_llama.bind(tmp_path).declaration == GraphDeclaration(
        adapters=AdapterCapability(batched=True, mountable=True),
        kv=KvCapability(dense_reads=False, delayed_affine="ordinary"),
        speculation=SpeculationCapability(**nothing),
    )
