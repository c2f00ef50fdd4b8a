"""Tiny random models of every family, as configurations to prove: each with what sets it apart from its neighbours.

A configuration is the family's plain one with changes.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from tests.engine.models import tiny_llama

VOCAB, CONTEXT = tiny_llama.VOCAB, tiny_llama.CONTEXT
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
EPS = {"rms_norm_eps": 1e-5}
MULTI_HEAD, MULTI_QUERY = {"num_key_value_heads": 4}, {"num_key_value_heads": 1}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LINEAR_ROPE = {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}
LLAMA3_ROPE = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
YARN_ROPE = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}
DYNAMIC_ROPE = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
PROPORTIONAL_ROPE = {"rope_scaling": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}}


def longrope(kind: str, pairs: int) -> dict[str, object]:
    """A rotation that stretches each pair in its own way; `kind` is "longrope" or "su"."""
    factors = [1.0 + step / 4 for step in range(pairs)]
    stated = {"type": kind, "short_factor": [1.0] * pairs, "long_factor": factors}
    return {
        "rope_scaling": stated | {"original_max_position_embeddings": 32},
        "original_max_position_embeddings": 32,
    }


@dataclass(frozen=True)
class TinyFamily:
    """The plain configuration of a family, the module of its oracle, and the configurations to prove."""

    plain: Mapping[str, object]
    cases: Mapping[str, Mapping[str, object]]
    oracle: str = ""


GEMMA = SIZES | EPS | {"head_dim": 16}
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text",
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
}
GLM4 = SIZES | EPS | UNTIED | {"head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "attention_bias": True}
GRANITE = (
    SIZES
    | EPS
    | {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 1e4,
    }
)

GEMMA4 = (
    SIZES
    | EPS
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": False,
    }
)
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

FAMILIES: Mapping[str, TinyFamily] = {
    "llama": TinyFamily(
        plain=SIZES | EPS,
        cases={
            "grouped queries, tied": TIED,
            "multi-head, untied, biases": MULTI_HEAD | UNTIED | {"attention_bias": True, "mlp_bias": True},
            "multi-query, own head size, llama3 rope": MULTI_QUERY | TIED | LLAMA3_ROPE | {"head_dim": 32},
            "sliding and full layers, yarn rope": TIED
            | YARN_ROPE
            | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
            "interleaved linear rope": TIED | LINEAR_ROPE | {"rope_traditional": True},
            "dynamic rope": TIED | DYNAMIC_ROPE,
            "longrope": TIED | longrope("longrope", 8),
            "proportional rope": TIED | PROPORTIONAL_ROPE,
        },
    ),
    "mistral": TinyFamily(
        plain=SIZES | EPS | UNTIED,
        oracle="llama",
        cases={
            "grouped queries, untied": {},
            "multi-head, own head size": MULTI_HEAD | {"head_dim": 32},
            "window as wide as the context, θ 1e6": {"sliding_window": CONTEXT, "rope_theta": 1e6},
        },
    ),
    "smollm3": TinyFamily(
        plain=SIZES | EPS | TIED,
        cases={
            "every fourth layer unrotated": {"num_hidden_layers": 4},
            "listed layers unrotated, untied": UNTIED | {"no_rope_layers": [0, 1]},
            "every second layer unrotated, biases": {
                "no_rope_layer_interval": 2,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "no layer unrotated, multi-head, yarn rope": MULTI_HEAD | YARN_ROPE | {"no_rope_layers": [1, 1]},
        },
    ),
    "qwen2": TinyFamily(
        plain=SIZES | EPS | TIED,
        cases={
            "grouped queries, tied": {},
            "multi-head, untied": MULTI_HEAD | UNTIED,
            "multi-query, yarn rope, θ 1e5": MULTI_QUERY | YARN_ROPE | {"rope_theta": 1e5},
        },
    ),
    "qwen3": TinyFamily(
        plain=SIZES | EPS | TIED | {"head_dim": 16, "rope_theta": 1e6},
        cases={
            "grouped queries, tied": {},
            "multi-head, untied, own head size": MULTI_HEAD | UNTIED | {"head_dim": 32},
            "multi-query, yarn rope": MULTI_QUERY | YARN_ROPE,
        },
    ),
    "gemma": TinyFamily(
        plain=GEMMA,
        cases={
            "multi-query": MULTI_QUERY,
            "multi-head, own head size": MULTI_HEAD | {"head_dim": 32},
            "grouped queries, θ 1e5": {"rope_theta": 1e5},
        },
    ),
    "gemma2": TinyFamily(
        plain=GEMMA,
        cases={
            "grouped queries": {},
            "multi-head, tight soft caps": MULTI_HEAD | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
            "multi-query, own query scale and head size": MULTI_QUERY | {"query_pre_attn_scalar": 24, "head_dim": 32},
        },
    ),
    "gemma3_text": TinyFamily(
        plain=GEMMA3,
        cases={
            "every second layer full": {},
            "every third layer full, multi-query, linear rope": MULTI_QUERY
            | {"sliding_window_pattern": 3, "num_hidden_layers": 4}
            | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "multi-head, untied, narrow window": MULTI_HEAD | UNTIED | {"sliding_window": 3},
            "window wider than the context": {"sliding_window": 4 * CONTEXT},
        },
    ),
    "gemma3": TinyFamily(
        plain={"vocab_size": VOCAB, "text_config": GEMMA3},
        cases={
            "text_config, language_model": {},
            "defaults for heads": {
                "text_config": {
                    k: v for k, v in GEMMA3.items() if k not in ("num_attention_heads", "num_key_value_heads")
                }
            },
            "multi-query, wide pattern": {
                "text_config": GEMMA3 | MULTI_QUERY | {"sliding_window_pattern": 6, "num_hidden_layers": 6}
            },
        },
    ),
    "phi3": TinyFamily(
        plain=SIZES | EPS | UNTIED,
        cases={
            "grouped queries, untied": {},
            "partial longrope": {"partial_rotary_factor": 0.75, "head_dim": None} | longrope("longrope", 6),
            "multi-head, tied, su rope": MULTI_HEAD | TIED | longrope("su", 8),
            "partial rope": {"partial_rotary_factor": 0.5},
        },
    ),
    "olmo2": TinyFamily(
        plain=SIZES | EPS | UNTIED,
        cases={
            "grouped queries, untied": {},
            "multi-head, tied, own head size": MULTI_HEAD | TIED | {"head_dim": 32},
            "multi-query, biases, linear rope": MULTI_QUERY | LINEAR_ROPE | {"attention_bias": True, "mlp_bias": True},
        },
    ),
    "glm4": TinyFamily(
        plain=GLM4,
        cases={
            "grouped queries, biases": {},
            "multi-head, no biases, rotation of halves": MULTI_HEAD
            | {"attention_bias": False, "rope_traditional": False},
            "multi-query, own head size, a quarter rotates": MULTI_QUERY
            | {"head_dim": 32, "partial_rotary_factor": 0.25},
        },
    ),
    "granite": TinyFamily(
        plain=GRANITE,
        cases={
            "grouped queries, tied": TIED,
            "multi-head, untied, biases": MULTI_HEAD | UNTIED | {"attention_bias": True, "mlp_bias": True},
            "multi-query, yarn rope": MULTI_QUERY | TIED | YARN_ROPE,
        },
    ),
    "starcoder2": TinyFamily(
        plain=SIZES | TIED,
        cases={
            "grouped queries, tied": {},
            "multi-head, untied": MULTI_HEAD | UNTIED,
            "multi-query, θ 1e4, own epsilon": MULTI_QUERY | {"rope_theta": 1e4, "norm_epsilon": 1e-4},
        },
    ),
    "mixtral": TinyFamily(
        plain=SIZES | EPS | UNTIED | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
        cases={
            "two of four experts": {},
            "one of three experts, multi-head": MULTI_HEAD | {"num_local_experts": 3, "num_experts_per_tok": 1},
            "all experts, multi-query, tied, interleaved rope": MULTI_QUERY
            | TIED
            | {"num_experts_per_tok": 4, "rope_traditional": True},
        },
    ),
    "qwen3_moe": TinyFamily(
        plain=SIZES | EPS | UNTIED | EXPERTS | {"head_dim": 16, "rope_theta": 1e6},
        cases={
            "three of six experts": {},
            "weights not normalised, multi-head, own head size": MULTI_HEAD | {"head_dim": 32, "norm_topk_prob": False},
            "every second layer sparse, tied": TIED | {"decoder_sparse_step": 2, "num_hidden_layers": 4},
            "a listed layer dense, multi-query": MULTI_QUERY | {"mlp_only_layers": [1], "num_hidden_layers": 3},
        },
    ),
    "qwen3_5": TinyFamily(
        plain=SIZES | EPS | UNTIED | GATED_DELTA | {"head_dim": 16, "intermediate_size": 96},
        cases={
            "every second layer full": {},
            "value heads as key heads, tied, half rotates": TIED
            | {"linear_num_key_heads": 4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "three linear layers to a full one, multi-query, long convolution": MULTI_QUERY
            | {"num_hidden_layers": 5, "full_attention_interval": 4, "linear_conv_kernel_dim": 6},
            "a linear layer at the end, keys shared by all": {"num_hidden_layers": 3, "linear_num_key_heads": 1},
            "biases, multi-head": MULTI_HEAD | {"attention_bias": True},
            "experts": EXPERTS | {"shared_expert_intermediate_size": 64},
        },
    ),
    "gemma4_text": TinyFamily(
        plain=GEMMA4,
        cases={
            "sizes of their own in full layers, inputs of their own": {},
            "shared keys and values, wide when shared": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "shared, not wide, multi-query, no inputs of their own": MULTI_QUERY
            | {"num_kv_shared_layers": 3, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
            "keys as values, own number of them": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "experts beside dense feed-forwards": {
                "enable_moe_block": True,
                "num_experts": 5,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
                "hidden_size_per_layer_input": 0,
            },
            "listed kinds, untied, own cap": UNTIED
            | {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "final_logit_softcapping": 9.0,
                "num_kv_shared_layers": 2,
            },
        },
    ),
}

CASES = {(name, case): found for name, family in FAMILIES.items() for case, found in family.cases.items()}


def config_of(name: str, changes: Mapping[str, object]) -> dict[str, object]:
    """The document that `config.json` holds."""
    return {"model_type": name, **FAMILIES[name].plain, **changes}


def build(name: str, config: Mapping[str, object], *, seed: int = 7) -> nn.Module:
    """A seeded mlx-lm model in which no parameter is trivial, and whose greedy ids are clear and varied."""
    module = importlib.import_module(f"mlx_lm.models.{FAMILIES[name].oracle or name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    if name.startswith("gemma3") and config.get("tie_word_embeddings", True):
        getattr(model, "language_model", model).sanitize({})  # ties, as on files without a head
    model.update(tree_map_with_path(_shaken, model.parameters()))
    if name.startswith(
        ("gemma", "granite")
    ):  # whose embeddings are scaled, and tied: a model would repeat its last token
        table = getattr(model, "language_model", model).model.embed_tokens
        table.weight = 0.25 * table.weight
    mx.eval(model.parameters())
    return model


def _shaken(path: str, parameter: mx.array) -> mx.array:
    """Gains and biases start as ones and zeros, which would hide a missing one; products start too small to matter."""
    if parameter.ndim == 1:
        return parameter + (0.2 if path.endswith("weight") else 0.05) * mx.random.normal(parameter.shape)
    return parameter if "embed_tokens" in path else 3.0 * parameter


def save(folder, model: nn.Module, config: Mapping[str, object]) -> None:
    """Write the model as its users find it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
