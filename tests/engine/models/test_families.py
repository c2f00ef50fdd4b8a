"""Every family against mlx-lm on the same random weights, read from files as users have them.

Logits are compared relative to the largest one. With mlx's own arithmetic and the BLAS inside mlx they are mlx-lm's own
bits, save where a layer slides, since mlx-lm's rotating cache then adds in another order, or recurs, since stretches of
tokens are computed in chunks.
"""

import copy
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import mistral3

from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import forward, logits_of, relative_difference

ROUNDING = 1e-5
PROMPT_TOKENS, GREEDY_TOKENS = 40, 64
STRETCHES = (slice(None, -3), slice(-3, -2), slice(-2, -1), slice(-1, None))
each_case = pytest.mark.parametrize(("family", "case"), tiny_families.CASES, ids=map(": ".join, tiny_families.CASES))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a case once and gives its folder and its oracle."""
    known = {}

    def write(family, case):
        if (family, case) not in known:
            config = tiny_families.config_of(family, tiny_families.CASES[family, case])
            model = tiny_families.build(family, config)
            folder = tmp_path_factory.mktemp(family)
            tiny_families.save(folder, model, config)
            known[family, case] = folder, tiny_llama.Oracle(model)
        return known[family, case]

    return write


def greedy(binding, prompt, count):
    caches, ids = [binding.make_cache()], []
    part = prompt
    for _ in range(count):
        part = [mx.argmax(forward(binding, [part], caches)[0][-1]).item()]
        ids += part
    return ids


@pytest.mark.parametrize("library_arithmetic", [False, True], ids=["composed", "library"])
@each_case
def test_logits_equal_mlx_lms(written, family, case, library_arithmetic):
    folder, oracle = written(family, case)
    prompt = tiny_llama.random_prompt(1, PROMPT_TOKENS)
    found = logits_of(tiny_llama.bind(folder, library_arithmetic=library_arithmetic), prompt)
    assert relative_difference(found, oracle.logits(prompt)) < ROUNDING


def test_bits_equal_mlx_lms_where_no_layer_slides_or_recurs():
    """In a process of its own, because this one has another BLAS."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.engine.models.compare_bits"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    compared = dict(line.rsplit(": ", 1) for line in ran.stdout.splitlines())
    assert len(compared) == len(tiny_families.CASES)
    assert sum(answer == "equal" for answer in compared.values()) > 40
    assert [case for case, answer in compared.items() if answer == "unequal"] == []


@each_case
def test_greedy_ids_equal_mlx_lms(written, family, case):
    folder, oracle = written(family, case)
    prompt = tiny_llama.random_prompt(2, 20)
    found = greedy(tiny_llama.bind(folder), prompt, GREEDY_TOKENS)
    assert found == oracle.greedy(prompt, GREEDY_TOKENS)
    assert len(set(found)) > 3


@each_case
def test_a_row_in_company_equals_the_row_alone(written, family, case):
    """With fixed row tiles to the bit, for prompts and for single tokens, at any place in the step."""
    binding = tiny_llama.bind(written(family, case)[0], row_tile_tokens=8)
    rows = [tiny_llama.random_prompt(seed, length + 3) for seed, length in ((1, 21), (2, 1), (3, 9))]
    together = [binding.make_cache() for _ in rows]
    found = [[] for _ in rows]
    for stretch in STRETCHES:
        for row, logits in enumerate(forward(binding, [tokens[stretch] for tokens in rows], together)):
            found[row].append(logits)
    for row, tokens in enumerate(rows):
        alone = [binding.make_cache()]
        wanted = [forward(binding, [tokens[stretch]], alone)[0] for stretch in STRETCHES]
        assert all(mx.array_equal(a, b).item() for a, b in zip(found[row], wanted, strict=True))


@each_case
def test_a_row_in_company_equals_mlx_lms_row(written, family, case):
    """Without row tiles, where rows share products and storage, and rounding depends on their number."""
    folder, oracle = written(family, case)
    binding = tiny_llama.bind(folder)
    rows = [tiny_llama.random_prompt(seed, length) for seed, length in ((1, 21), (2, 2), (3, 30))]
    caches = [binding.make_cache() for _ in rows]
    heads = forward(binding, [tokens[:-1] for tokens in rows], caches)
    tails = forward(binding, [tokens[-1:] for tokens in rows], caches)
    for tokens, *found in zip(rows, heads, tails, strict=True):
        assert relative_difference(mx.concatenate(found, axis=0), oracle.logits(tokens)) < 3 * ROUNDING


@pytest.mark.parametrize("dequantize", [False, True], ids=["stored form", "unpacked"])
@each_case
def test_quantized_weights_equal_mlx_lms(tmp_path, family, case, dequantize):
    config = tiny_families.config_of(family, tiny_families.CASES[family, case])
    model = tiny_families.build(family, config)
    nn.quantize(model, group_size=32, bits=8 if "head" in case else 4)
    scheme = {"group_size": 32, "bits": 8 if "head" in case else 4}
    tiny_families.save(tmp_path, model, config | {"quantization": scheme})
    prompt = tiny_llama.random_prompt(3, 24)
    found = logits_of(tiny_llama.bind(tmp_path, dequantize=dequantize), prompt)
    assert relative_difference(found, tiny_llama.Oracle(model).logits(prompt)) < ROUNDING


@each_case
def test_a_graph_holds_what_its_files_hold(written, family, case):
    folder, oracle = written(family, case)
    held = sum(array.nbytes for _, array in tree_flatten(oracle.model.parameters()))
    assert tiny_llama.bind(folder).weights_bytes == held


@pytest.mark.parametrize("tower", ["vision_tower.", "model.vision_tower.", "multi_modal_projector."])
def test_the_text_half_of_a_multimodal_checkpoint_is_served_in_every_family(tmp_path, tower):
    """As Mistral Small 3 is stored: its text model is a mistral."""
    text = tiny_families.config_of("mistral", {"head_dim": 32})
    config = {"model_type": "mistral3", "text_config": text}
    model = mistral3.Model(mistral3.ModelArgs.from_dict(copy.deepcopy(config)))
    tiny_families.save(tmp_path, model, config)
    tensors = dict(tree_flatten(model.parameters())) | {f"{tower}patch.weight": mx.ones((4, 4))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    prompt = tiny_llama.random_prompt(1, 20)
    wanted = tiny_llama.Oracle(model).logits(prompt)
    assert relative_difference(logits_of(tiny_llama.bind(tmp_path), prompt), wanted) < ROUNDING


def test_gemma3_stays_within_float16(tmp_path):
    """Its sums do not fit: they are kept at the largest number, as mlx-lm keeps them."""
    config = tiny_families.config_of("gemma3_text", {"tie_word_embeddings": True})
    model = tiny_families.build("gemma3_text", config)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight = layer.post_attention_layernorm.weight + 40000.0
        layer.post_feedforward_layernorm.weight = layer.post_feedforward_layernorm.weight + 40000.0
    model.set_dtype(mx.float16)
    tiny_families.save(tmp_path, model, config)
    prompt = tiny_llama.random_prompt(1, 12)
    found = logits_of(tiny_llama.bind(tmp_path, dtype="float16", compute_dtype="float16"), prompt)
    wanted = tiny_llama.Oracle(model).logits(prompt)
    assert mx.isfinite(wanted).all().item()
    assert relative_difference(found.astype(mx.float32), wanted.astype(mx.float32)) < 0.02


# What makes all layers of a one-layer model slide, in families whose windows mlx-lm drops.
WINDOWS = {
    "mistral": {},
    "gemma2": {},
    "phi3": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 0},
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [0]},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_a_family_with_a_window_of_its_own_sees_that_window_alone(tmp_path, family):
    """In one layer the last token sees a window; rotation is relative, so that window alone gives the same logits."""
    config = tiny_families.config_of(family, {"num_hidden_layers": 1} | WINDOWS[family])
    model = tiny_families.build(family, config)
    tiny_families.save(tmp_path, model, config | {"sliding_window": 8})
    oracle, prompt = tiny_llama.Oracle(model), tiny_llama.random_prompt(5, 60)
    found = logits_of(tiny_llama.bind(tmp_path), prompt)[-1]
    assert relative_difference(found, oracle.logits(prompt[-8:])[-1]) < ROUNDING
    assert relative_difference(found, oracle.logits(prompt)[-1]) > 1e-3
