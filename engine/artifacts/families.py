"""The families of decoder models, each a record of what differs from llama.

Where a family's own definition and `mlx_lm.models` disagree, the record says so.
Source: reference, model families §4.3; each family's configuration class in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.artifacts.family import BlockNorms, Family
from engine.artifacts.mixtures import MixtureRecord
from engine.artifacts.vision_shapes import PROJECTION, TOWER

if TYPE_CHECKING:
    from collections.abc import Mapping

_GELU_NAMES: Final = ("gelu_pytorch_tanh", "gelu", "gelu_new")

LLAMA: Final = Family(name="llama")
# Mistral's window holds for all layers in the model's own definition; mlx-lm drops it, here and wherever "throughout",
# "alternating", "upper_layers" or "unrotated" stands. The results differ for prompts beyond the window alone.
MISTRAL: Final = replace(LLAMA, sliding="throughout")

SMOLLM3: Final = Family(
    name="smollm3",
    defaults={"no_rope_layer_interval": 4, "max_position_embeddings": 32768},
    sliding="unrotated",
)

QWEN2: Final = Family(
    name="qwen2",
    defaults={"rope_theta": 1e6, "max_position_embeddings": 32768},
    attention_bias=True,
    output_bias=False,
    mlp_bias=False,
    sliding="upper_layers",
)

QWEN3: Final = Family(
    name="qwen3",
    defaults={"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 32768},
    head_norms="each",
    mlp_bias=False,
    sliding="upper_layers",
)

# The gate is exact, as in mlx-lm, whichever GELU the file names.
GEMMA: Final = Family(
    name="gemma",
    defaults={"head_dim": 256, "max_position_embeddings": 8192},
    norm="rms_plus_one",
    activation="gelu",
    activation_names=_GELU_NAMES,
    mlp_bias=False,
    embedding_scale="root",
)

GEMMA2: Final = replace(
    GEMMA,
    name="gemma2",
    defaults={
        **GEMMA.defaults,
        "query_pre_attn_scalar": 144.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    norms=BlockNorms(
        after_mixer="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
    ),
    activation="gelu_tanh",
    sliding="alternating",
)

# The text half; a vision tower beside it is not served.
GEMMA3: Final = replace(
    GEMMA2,
    name="gemma3",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    head_norms="each",
    sliding="pattern",
    embedding_scale="root_bfloat16",
    clips_sums=True,
    multimodal=True,
)

PHI3: Final = Family(
    name="phi3",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    query_key_value=("qkv_proj",),
    feed_forward=("gate_up_proj",),
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    sliding="throughout",
    served={"full_attn_mod": (1,)},
)

OLMO2: Final = Family(
    name="olmo2",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    norms=BlockNorms(
        before_mixer="",
        after_mixer="post_attention_layernorm",
        before_feed_forward="",
        after_feed_forward="post_feedforward_layernorm",
    ),
    head_norms="all",
)

GLM4: Final = Family(
    name="glm4",
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_traditional": True,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
    },
    norms=BlockNorms(after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"),
    feed_forward=("gate_up_proj",),
    output_bias=False,
    mlp_bias=False,
)

GRANITE: Final = Family(name="granite", defaults={"attention_multiplier": 1.0, "max_position_embeddings": 2048})

# The activation is exact, as in mlx-lm, whichever GELU the file names.
STARCODER2: Final = Family(
    name="starcoder2",
    defaults={
        "vocab_size": 49152,
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "rope_theta": 1e5,
        "max_position_embeddings": 4096,
    },
    norm="layer",
    feed_forward=("c_fc",),
    gated=False,
    down="c_proj",
    activation="gelu",
    activation_names=_GELU_NAMES,
    attention_bias="use_bias",
    output_bias="use_bias",
    mlp_bias="use_bias",
    norm_eps="norm_epsilon",
    sliding="throughout",
    served={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
)

MIXTRAL: Final = replace(
    MISTRAL,
    name="mixtral",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    attention_bias=False,
    output_bias=False,
    mixture=MixtureRecord(
        module="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
        weighing="scores",
        count="num_local_experts",
        inner="intermediate_size",
        normalises=False,
    ),
)
QWEN3_MOE: Final = replace(
    LLAMA,
    name="qwen3_moe",
    defaults={"rope_theta": 1e7},
    head_norms="each",
    mlp_bias=False,
    sliding="in_use",
    mixture=MixtureRecord(),
)

# The text half; a vision tower and draft layers beside it are not served.
QWEN3_5: Final = Family(
    name="qwen3_5",
    defaults={
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e5,
        "max_position_embeddings": 131072,
        "norm_topk_prob": True,
    },
    norm="rms_as_stored",
    head_norms="each",
    mlp_bias=False,
    mixture=MixtureRecord(shared="shared_expert"),
    recurrent=True,
    gates_attention=True,
    multimodal=True,
    dropped=("mtp.", "language_model.mtp.", "model.language_model.mtp."),
)
# The text half; vision and audio towers beside it are not served.
GEMMA4_MIXTURE: Final = MixtureRecord(
    module="",
    router="router.proj",
    stacked="experts.switch_glu",
    weighing="scores",
    switch="enable_moe_block",
    chosen="top_k_experts",
    normalises=False,
    beside=True,
)
GEMMA4: Final = Family(
    name="gemma4",
    defaults={
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4},
        },
    },
    norms=GEMMA2.norms,
    head_norms="each",
    activation="gelu_tanh",
    activation_names=_GELU_NAMES,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    sliding="pattern",
    embedding_scale="root",
    mixture=GEMMA4_MIXTURE,
    varied=True,
    multimodal=True,
)

# Encoder and decoder are one model but for a number in each layer, and a vision tower may stand beside them. Its files
# may state nothing but token ids, the canvas and the quantization. Numeric reference: `mlx_vlm.models.diffusion_gemma`.
DIFFUSION_GEMMA: Final = replace(
    GEMMA4,
    name="diffusion_gemma",
    method="denoising",
    root="model.decoder",
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "max_position_embeddings": 262144,
        "query_pre_attn_scalar": 1.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "image_token_id": 258880,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "canvas_length": 256,
        "rope_parameters": GEMMA4.defaults["rope_parameters"],
    },
    activation_names=("gelu_pytorch_tanh",),
    attention_bias="attention_bias",
    output_bias="attention_bias",
    sliding="all_but_sixth_and_last",
    mixture=replace(GEMMA4_MIXTURE, stacked="experts", switch="", scales_apart=True),
    multimodal=False,
    dropped=("model.encoder.",),
    kept=(".layer_scalar",),
    tower=(f"{TOWER}.", f"{PROJECTION}."),
    served={
        "attention_k_eq_v": (True,),
        "attn_logit_softcapping": (),
        "decoder_sparse_step": (1,),
        "embedding_multiplier": (),
        "enable_moe_block": (True,),
        "hidden_size_per_layer_input": (0,),
        "logits_scaling": (1,),
        "mlp_only_layers": ([],),
        "no_rope_layer_interval": (),
        "no_rope_layers": (),
        "num_kv_shared_layers": (0,),
        "query_pre_attn_scalar": (1,),
        "residual_multiplier": (1,),
        "tie_word_embeddings": (True,),
    },
)

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        LLAMA,
        SMOLLM3,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        PHI3,
        OLMO2,
        GLM4,
        GRANITE,
        STARCODER2,
        MIXTRAL,
        QWEN3_MOE,
        QWEN3_5,
        GEMMA4,
        DIFFUSION_GEMMA,
    )
}
# What configuration files call a family beside its own name.
ALIASES: Final[Mapping[str, Family]] = {
    "mistral": MISTRAL,
    "iquestcoder": LLAMA,
    "xverse": LLAMA,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "diffusion_gemma_text": DIFFUSION_GEMMA,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
}
