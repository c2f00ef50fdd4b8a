"""GGUF files of every family, written as its converter writes them, against mlx-lm on the same weights.

Names, permutations and the 1 in Gemma's gains are the converters'; the table here is independent of the engine's.
"""

import gguf
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import UnsupportedArtifactError
from tests.engine.artifacts.tiny_files import permuted
from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import logits_of, relative_difference

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
NAMES = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "olmo2": SANDWICH,
    "phi3": FUSED,
    "glm4": FUSED | {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
PERMUTED = {"llama", "smollm3", "granite"}
KEYS = {
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
}
# Architecture: the family's name in the table of cases, and what is different from its plain form.
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window_pattern": 6, "num_hidden_layers": 6, "query_pre_attn_scalar": 16, "rope_theta": 1e6},
    ),
    "phi3": ("phi3", {"partial_rotary_factor": 0.75} | tiny_families.longrope("longrope", 6)),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {}),
}


def stored_name(architecture, name):
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(COMMON | NAMES.get(architecture, {}))[part]}.{kind}"


def stored_values(architecture, name, values, config):
    if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return permuted(values, heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def write(path, architecture, model, config):
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
    }
    if architecture == "gemma3":
        numbers["attention.sliding_window"] = config["sliding_window"]
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    eps = "layer_norm_epsilon" if architecture == "starcoder2" else "layer_norm_rms_epsilon"
    writer.add_float32(f"{architecture}.attention.{eps}", config.get("rms_norm_eps", 1e-5))
    theta = {"qwen2": 1e6, "starcoder2": 1e5}.get(architecture, 1e4)
    writer.add_float32(f"{architecture}.rope.freq_base", config.get("rope_theta", theta))
    for key, field in KEYS.get(architecture, {}).items():
        writer.add_float32(f"{architecture}.{key}", config[field])
    if "rope_scaling" in config:
        for length in ("short", "long"):
            factors = np.array(config["rope_scaling"][f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        scale = np.sqrt(1 + np.log(config["max_position_embeddings"] / 32) / np.log(32))
        writer.add_float32(f"{architecture}.rope.scaling.attn_factor", float(scale))
    for name, tensor in tree_flatten(model.parameters()):
        writer.add_tensor(stored_name(architecture, name), stored_values(architecture, name, np.array(tensor), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", MODELS)
def test_a_converted_model_gives_mlx_lms_logits(tmp_path, architecture):
    family, changes = MODELS[architecture]
    config = tiny_families.config_of(family, changes)
    model = tiny_families.build(family, config)
    write(tmp_path / "model.gguf", architecture, model, config)
    prompt = tiny_llama.random_prompt(1, 40)
    found = logits_of(tiny_llama.bind(tmp_path / "model.gguf"), prompt)
    assert relative_difference(found, tiny_llama.Oracle(model).logits(prompt)) < 1e-5


@pytest.mark.parametrize(("architecture", "layers", "hidden"), [("gemma2", 46, 96), ("gemma3", 62, 96)])
def test_the_widest_gemmas_scale_scores_by_another_size_than_the_heads(tmp_path, architecture, layers, hidden):
    """Their files do not say so; 27B is known by the number of its layers."""
    family, changes = MODELS[architecture]
    config = tiny_families.config_of(family, changes | {"num_hidden_layers": layers, "hidden_size": hidden})
    model = tiny_families.build(family, config)
    write(tmp_path / "model.gguf", architecture, model, config)
    assert open_artifact(tmp_path / "model.gguf").config.score_scale == (hidden / 4) ** -0.5


def test_a_tensor_of_another_family_is_not_used_for_this_one(tmp_path):
    """An architecture reads its own names alone: a norm that qwen2 does not have is left over, and named."""
    config = tiny_families.config_of("qwen3", {"head_dim": 16, "attention_bias": True})
    model = tiny_families.build("qwen2", tiny_families.config_of("qwen2", {}))
    model.model.layers[0].self_attn.q_norm = tiny_families.build("qwen3", config).model.layers[0].self_attn.q_norm
    write(tmp_path / "model.gguf", "qwen2", model, tiny_families.config_of("qwen2", {}))
    with pytest.raises(UnsupportedArtifactError, match=r"qwen2 model has no use for: blk\.0\.attn_q_norm\.weight"):
        tiny_llama.bind(tmp_path / "model.gguf")
