"""What a family's record means for configurations and names: defaults of absent fields, windows, prefixes, drops."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.artifacts.artifact import open_artifact
from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.huggingface import model_config
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError
from tests.engine.artifacts.tiny_files import llama_tensors

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 128,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def parsed(family, **changes):
    return model_config({"model_type": family, **SIZES, **changes})


DEFAULTS = {
    "smollm3": {"theta": 1e4, "eps": 1e-6, "biases": (False, False, False), "head_dim": 16},
    "qwen2": {"theta": 1e6, "eps": 1e-6, "biases": (True, False, False), "head_dim": 16},
    "qwen3": {"theta": 1e6, "eps": 1e-6, "biases": (False, False, False), "head_dim": 128},
    "gemma": {"theta": 1e4, "eps": 1e-6, "biases": (False, False, False), "head_dim": 256},
    "gemma2": {"theta": 1e4, "eps": 1e-6, "biases": (False, False, False), "head_dim": 256},
    "gemma3_text": {"theta": 1e6, "eps": 1e-6, "biases": (False, False, False), "head_dim": 256},
    "phi3": {"theta": 1e4, "eps": 1e-5, "biases": (False, False, False), "head_dim": 16},
    "olmo2": {"theta": 1e4, "eps": 1e-5, "biases": (False, False, False), "head_dim": 16},
    "glm4": {"theta": 1e4, "eps": 1.5625e-7, "biases": (True, False, False), "head_dim": 128},
    "granite": {"theta": 1e4, "eps": 1e-6, "biases": (False, False, False), "head_dim": 16},
    "starcoder2": {"theta": 1e5, "eps": 1e-5, "biases": (True, True, True), "head_dim": 16},
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_absent_fields_have_the_familys_own_defaults(family):
    config = parsed(family)
    assert DEFAULTS[family] == {
        "theta": config.layer_ropes[5].theta if config.layer_ropes[5] else config.layer_ropes[3].theta,
        "eps": config.norm_eps,
        "biases": (config.attention_bias, config.output_bias, config.mlp_bias),
        "head_dim": config.head_dim,
    }


def test_a_gemma3_file_that_states_its_sizes_alone_is_complete():
    """As google/gemma-3-4b's does: everything else is the default of its configuration class."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = model_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.context_length, config.sliding_window, config.score_scale) == (131072, 1024, 256**-0.5)
    assert config.layer_types[:7] == (*(SLIDING,) * 5, FULL, SLIDING)
    local, whole = config.layer_ropes[0], config.layer_ropes[5]
    assert (local.kind, local.theta, whole.kind, whole.theta, whole.factor) == ("default", 1e4, "linear", 1e6, 8.0)
    assert config.scaling.embeddings == 50.5  # the bfloat16 beside the root of 2560, which is 50.596


def test_newer_gemma3_files_say_the_same_per_layer_type():
    ropes = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    older = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3, "sliding_window": 16}
    newer = {"rope_parameters": ropes, "layer_types": [SLIDING, SLIDING, FULL] * 2, "sliding_window": 16}
    assert parsed("gemma3_text", **older) == parsed("gemma3_text", **newer)
    assert parsed("gemma3_text", **older) == parsed(
        "gemma3_text",
        **{name: value for name, value in older.items() if "pattern" not in name},
        _sliding_window_pattern=3,
    )


@pytest.mark.parametrize(
    ("family", "fields", "sliding"),
    [
        ("llama", {}, []),
        ("mistral", {}, [0, 1, 2, 3, 4, 5]),
        ("phi3", {}, [0, 1, 2, 3, 4, 5]),
        ("starcoder2", {}, [0, 1, 2, 3, 4, 5]),
        ("gemma2", {}, [0, 2, 4]),
        ("gemma3_text", {}, [0, 1, 2, 3, 4]),
        ("qwen2", {}, []),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, [4, 5]),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 4}, [4, 5]),
        ("smollm3", {}, []),
        ("smollm3", {"use_sliding_window": True}, [3]),
    ],
)
def test_layers_slide_as_the_family_defines(family, fields, sliding):
    config = parsed(family, sliding_window=16, **fields)
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == SLIDING] == sliding
    assert config.sliding_window == (16 if sliding else 0)


def test_smollm3_rotates_all_but_every_fourth_layer_or_as_listed():
    assert [rope is not None for rope in parsed("smollm3").layer_ropes] == [True, True, True, False, True, True]
    listed = parsed("smollm3", no_rope_layers=[0, 1, 1, 0, 1, 1])
    assert [rope is not None for rope in listed.layer_ropes] == [False, True, True, False, True, True]
    with pytest.raises(CorruptArtifactError, match="no_rope_layers must name every layer"):
        parsed("smollm3", no_rope_layers=[1])


def test_a_soft_cap_of_null_is_none():
    assert (parsed("gemma2").scaling.score_softcap, parsed("gemma2").scaling.logit_softcap) == (50.0, 30.0)
    uncapped = parsed("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None).scaling
    assert (uncapped.score_softcap, uncapped.logit_softcap) == (0.0, 0.0)


def test_granites_factors_are_read():
    stated = {"logits_scaling": 8.0, "attention_multiplier": 0.2, "embedding_multiplier": 12.0}
    config = parsed("granite", residual_multiplier=0.22, **stated)
    assert (config.scaling.logits, config.score_scale) == (8.0, 0.2)
    assert (config.scaling.embeddings, config.scaling.residuals) == (12.0, 0.22)


def test_aliases_are_no_families_of_their_own():
    assert not ALIASES.keys() & FAMILIES.keys()
    assert {family.name for family in ALIASES.values()} <= FAMILIES.keys()


GEMMA3 = {
    "model_type": "gemma3",
    "vocab_size": 48,
    "text_config": SIZES | {"num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 2},
}


def gemma3_tensors(prefix):
    """Tensors as multimodal checkpoints name them, beside a vision tower."""
    tensors = dict(llama_tensors())
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}_feedforward_layernorm.weight": np.ones(64, np.float32) for name in ("pre", "post")}
        tensors |= {f"{at}.self_attn.{name}_norm.weight": np.ones(16, np.float32) for name in ("q", "k")}
    return {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def write(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("prefix", "tower"),
    [
        ("language_model.model.", "vision_tower."),
        ("model.language_model.", "model.vision_tower."),
        ("model.language_model.", "model.multi_modal_projector."),
    ],
)
def test_the_text_half_of_a_multimodal_checkpoint_is_found_and_the_rest_dropped(tmp_path, prefix, tower):
    text = gemma3_tensors(prefix)
    write(tmp_path, GEMMA3, text | {f"{tower}encoder.weight": np.ones((4, 4), np.float32)})
    artifact = open_artifact(tmp_path)
    assert len(artifact.tensors) == len(text)
    assert artifact.weights_bytes == sum(tensor.nbytes for tensor in text.values())
    assert "model.layers.1.self_attn.k_norm.weight" in artifact.tensors


def test_a_name_that_two_tensors_claim_is_refused(tmp_path):
    name = "embed_tokens.weight"
    both = gemma3_tensors("language_model.model.") | {f"model.{name}": np.ones((48, 64), np.float32)}
    write(tmp_path, GEMMA3, both)
    with pytest.raises(CorruptArtifactError, match=rf"holds model.{name} twice: as .*{name} and as .*{name}"):
        open_artifact(tmp_path)


def test_a_model_of_text_alone_takes_names_as_they_are_stored(tmp_path):
    write(tmp_path, {"model_type": "llama", **GEMMA3["text_config"]}, gemma3_tensors("language_model.model."))
    with pytest.raises(MissingArtifactError, match=r"has no model\.embed_tokens\.weight"):
        open_artifact(tmp_path)


def test_quantization_is_stated_under_stored_names(tmp_path):
    stored = "language_model.model.layers.0.self_attn.q_proj"
    stated = {"bits": 4, "group_size": 64, stored: {"bits": 8}, "vision_tower.encoder": False}
    config = model_config(GEMMA3 | {"quantization": stated})
    assert list(config.quantization.overrides) == ["model.layers.0.self_attn.q_proj"]
    assert config.quantization.scheme("model.layers.0.self_attn.q_proj").bits == 8
