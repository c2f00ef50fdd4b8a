"""Models with experts: every form in which their matrices are stored, and what is refused by name.

That their logits are mlx-lm's is proven with all families.
"""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral, qwen3_moe

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import (
    ArtifactError,
    ConfigurationError,
    CorruptArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.models import tiny_llama
from tests.engine.models.test_llama import packed_logits

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": tiny_llama.VOCAB,
    "max_position_embeddings": tiny_llama.CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen3_moe": SIZES
    | {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    },
}
ORACLES = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
PROMPT = tiny_llama.random_prompt(1, 40)


def write(folder, family, *, bits=None, mode="affine", **changes):
    """A seeded model in mlx-lm's form; returns its oracle, its tensors, and its configuration."""
    config = {"model_type": family} | CONFIGS[family] | changes
    mx.random.seed(7)
    model = ORACLES[family].Model(ORACLES[family].ModelArgs.from_dict(config))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, mode=mode)
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": mode}
    tensors = dict(tree_flatten(model.parameters()))
    save(folder, config, tensors)
    return tiny_llama.Oracle(model), tensors, config


def save(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def one_by_one(tensors, family):
    """As Hugging Face stores mixtures: each expert's matrices by themselves."""
    module, gate, up, down = NAMES[family]
    names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    found = {}
    for name, tensor in tensors.items():
        head, _, tail = name.partition(f".{module}.switch_mlp.")
        if not tail:
            found[name] = tensor
            continue
        projection, _, part = tail.partition(".")
        for expert in range(tensor.shape[0]):
            found[f"{head}.{module}.experts.{expert}.{names[projection]}.{part}"] = tensor[expert]
    return found


def fused(tensors, family):
    """As newer files store them: gate and up of all experts in one tensor."""
    module = NAMES[family][0]
    found = dict(tensors)
    for layer in range(SIZES["num_hidden_layers"]):
        path = f"model.layers.{layer}.{module}"
        gate, up, down = (found.pop(f"{path}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        found |= {f"{path}.experts.gate_up_proj": mx.concatenate([gate, up], axis=1), f"{path}.experts.down_proj": down}
    return found


def logits(folder, **how):
    return packed_logits(tiny_llama.bind(folder, **how), [PROMPT])[0]


def assert_close(found, wanted):
    assert mx.abs(wanted).max().item() > 0.1
    assert (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item() < 1e-5


@pytest.mark.parametrize("stored_as", [one_by_one, fused])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_stored_form_gives_the_same_bits(tmp_path, family, stored_as):
    oracle, tensors, config = write(tmp_path, family)
    stacked = logits(tmp_path)
    assert_close(stacked, oracle.logits(PROMPT))
    stored = stored_as(tensors, family)
    assert stored.keys() != tensors.keys()
    save(tmp_path, config, stored)
    assert mx.array_equal(logits(tmp_path), stacked).item()


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("stored_as", [None, one_by_one])
@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_experts_equal_mlx_lms(tmp_path, family, bits, mode, stored_as, dequantize):
    oracle, tensors, config = write(tmp_path, family, bits=bits, mode=mode)
    if stored_as is not None:
        save(tmp_path, config, stored_as(tensors, family))
    assert_close(logits(tmp_path, dequantize=dequantize), oracle.logits(PROMPT))


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "unpacked"])
def test_routers_may_be_quantized_finer_than_the_rest(tmp_path, dequantize):
    """As mlx-lm converts mixtures: eight bits for the router, whatever the experts have."""
    config = {"model_type": "qwen3_moe"} | CONFIGS["qwen3_moe"]
    mx.random.seed(7)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    finer = {"group_size": 64, "bits": 8}
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and (finer if path.endswith("mlp.gate") else True)
        ),
    )
    config["quantization"] = {"group_size": 32, "bits": 4}
    config["quantization"] |= {f"model.layers.{layer}.mlp.gate": finer for layer in range(2)}
    save(tmp_path, config, dict(tree_flatten(model.parameters())))
    assert_close(logits(tmp_path, dequantize=dequantize), tiny_llama.Oracle(model).logits(PROMPT))


def test_a_packed_mixture_holds_no_more_than_its_files(tmp_path):
    _, tensors, _ = write(tmp_path, "qwen3_moe", bits=4)
    binding = tiny_llama.bind(tmp_path, dequantize=False)
    assert binding.weights_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tile", [1, 8])
def test_with_row_tiles_a_row_is_the_same_bits_in_any_company(tmp_path, tile):
    write(tmp_path, "qwen3_moe")
    binding = tiny_llama.bind(tmp_path, row_tile_tokens=tile)
    prompts = [tiny_llama.random_prompt(seed, length) for seed, length in ((1, 40), (2, 17), (3, 2), (4, 33))]
    for prompt, found in zip(prompts, packed_logits(binding, prompts), strict=True):
        assert mx.array_equal(found, packed_logits(binding, [prompt])[0]).item()


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_in_sixteen_bits_are_refused_on_a_cpu_by_name(tmp_path, family):
    write(tmp_path, family)
    with pytest.raises(ConfigurationError, match="compute_dtype: experts cannot be computed in bfloat16 on a CPU"):
        tiny_llama.bind(tmp_path, dtype="bfloat16", compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 7}, CorruptArtifactError, "num_experts_per_tok 7 is more than all 6 experts"),
        ({"num_experts_per_tok": None}, MissingArtifactError, "has no num_experts_per_tok"),
        ({"num_experts": 5}, CorruptArtifactError, "6, .* the configuration needs .5, "),
        ({"num_experts": 5000}, CorruptArtifactError, "num_experts must be a whole number from 1 to 4096"),
        ({"num_experts": "six"}, CorruptArtifactError, "num_experts must be"),
        ({"moe_intermediate_size": 48}, CorruptArtifactError, r"_proj\.weight has the shape \[6, (32, 64|64, 32)\]"),
        ({"moe_intermediate_size": None}, MissingArtifactError, "has no moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, CorruptArtifactError, "decoder_sparse_step must be"),
        ({"norm_topk_prob": 1}, CorruptArtifactError, "norm_topk_prob must be true or false"),
        ({"mlp_only_layers": [0]}, MissingArtifactError, r"has no model\.layers\.0\.mlp\.gate_proj\.weight"),
    ],
    ids=str,
)
def test_contradictory_configurations_are_refused_by_name(tmp_path, changes, error, message):
    _, _, config = write(tmp_path, "qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=message):
        open_artifact(tmp_path)


def test_a_missing_expert_is_named(tmp_path):
    _, tensors, config = write(tmp_path, "mixtral")
    stored = one_by_one(tensors, "mixtral")
    del stored["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save(tmp_path, config, stored)
    with pytest.raises(MissingArtifactError, match=r"has no model\.layers\.1\..*experts\.3\.w2\.weight"):
        open_artifact(tmp_path)


def test_an_expert_too_many_is_named(tmp_path):
    _, tensors, config = write(tmp_path, "mixtral")
    stored = one_by_one(tensors, "mixtral")
    stored["model.layers.1.block_sparse_moe.experts.4.w2.weight"] = mx.zeros((64, 96))
    save(tmp_path, config, stored)
    with pytest.raises(UnsupportedArtifactError, match=r"experts\.4\.w2\.weight"):
        tiny_llama.bind(tmp_path)


def test_experts_of_one_stack_in_different_forms_are_refused(tmp_path):
    _, tensors, config = write(tmp_path, "mixtral", bits=4)
    stored = one_by_one(tensors, "mixtral")
    module = "model.layers.0.block_sparse_moe.experts.1.w1"
    for part in ("scales", "biases"):
        del stored[f"{module}.{part}"]
    stored[f"{module}.weight"] = mx.zeros((96, 64))
    config["quantization"][module] = False
    save(tmp_path, config, stored)
    with pytest.raises(ArtifactError, match=r"experts\.0\.w1\.weight and the same matrix of other experts"):
        tiny_llama.bind(tmp_path, dequantize=False)
