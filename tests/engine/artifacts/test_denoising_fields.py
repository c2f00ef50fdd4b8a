"""The configuration of DiffusionGemma: what its files may leave out, and what is refused by name."""

import pytest

from engine.artifacts.config import FULL_ATTENTION, SLIDING_ATTENTION
from engine.artifacts.huggingface import model_config
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from tests.engine.models.tiny_diffusion import TEXT

BARE = {"model_type": "diffusion_gemma"}


def read(text=None, **top):
    return model_config(BARE | top | ({} if text is None else {"text_config": text}))


def test_a_file_may_state_nothing_but_its_type():
    config = read()
    assert (config.method, config.model_type) == ("denoising", "diffusion_gemma")
    assert (config.hidden_size, config.layers, config.intermediate_size, config.vocab_size) == (2816, 30, 2112, 262144)
    assert (config.heads, config.kv_heads, config.head_dim) == (16, 8, 256)
    assert (config.kv_heads_of(5), config.head_dim_of(5), config.keys_are_values(5)) == (2, 512, True)
    assert (config.kv_heads_of(0), config.head_dim_of(0), config.keys_are_values(0)) == (8, 256, False)
    assert (config.mixture.experts, config.mixture.chosen, config.mixture.inner) == (128, 8, 704)
    assert config.mixture.layers == frozenset(range(30))
    assert (config.norm_eps, config.context_length, config.sliding_window) == (1e-6, 262144, 1024)
    assert (config.score_scale, config.scaling.score_softcap, config.scaling.logit_softcap) == (1.0, 0.0, 30.0)
    assert config.scaling.embeddings == 2816**0.5
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (True, 2, (1,))
    denoising = config.denoising
    assert (denoising.canvas_length, denoising.image_token_id, denoising.pad_token_id) == (256, 258880, 0)


def test_five_layers_slide_to_a_full_one_and_the_last_is_full():
    assert read().layer_types == ((SLIDING_ATTENTION,) * 5 + (FULL_ATTENTION,)) * 5
    assert read({"num_hidden_layers": 8}).layer_types == (
        *(SLIDING_ATTENTION,) * 5,
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        FULL_ATTENTION,
    )


def test_the_two_kinds_of_layers_rotate_in_their_own_ways():
    sliding, full = read().layer_ropes[0], read().layer_ropes[5]
    assert (sliding.kind, sliding.theta, sliding.dims) == ("default", 1e4, 256)
    assert (full.kind, full.theta, full.dims, full.partial_rotary_factor) == ("proportional", 1e6, 512, 0.25)


def test_what_is_stated_wins_over_defaults_and_the_top_has_the_canvas():
    config = read(TEXT | {"canvas_length": 8, "eos_token_id": [7]}, canvas_length=24, eos_token_id=[5, 6])
    assert (config.hidden_size, config.layers, config.denoising.canvas_length) == (32, 2, 24)
    assert config.eos_token_ids == (5, 6, 7)
    assert read(TEXT | {"canvas_length": 8}).denoising.canvas_length == 8
    assert read(TEXT, quantization={"bits": 4, "group_size": 64}).quantization.default.bits == 4


def test_a_text_model_by_itself_is_the_same_family():
    alone = model_config({**TEXT, "model_type": "diffusion_gemma_text", "canvas_length": 16})
    assert alone == read(TEXT, canvas_length=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_k_eq_v": False}, "attention_k_eq_v 'False' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings 'False' is not supported"),
        ({"enable_moe_block": False}, "enable_moe_block 'False' is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers '1' is not supported"),
        ({"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input '16' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping '50.0' is not supported"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar '256' is not supported"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier '2.0' is not supported"),
        ({"logits_scaling": 2.0}, "logits_scaling '2.0' is not supported"),
        ({"residual_multiplier": 0.5}, "residual_multiplier '0.5' is not supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers '\[0\]' is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step '2' is not supported"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers '\[1, 0\]' is not supported"),
        ({"no_rope_layer_interval": 2}, "no_rope_layer_interval '2' is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer type 'chunked' is not supported"),
    ],
    ids=str,
)
def test_what_the_graph_would_compute_otherwise_is_refused_by_name(changes, message):
    read(TEXT)
    with pytest.raises(UnsupportedArtifactError, match=message):
        read(TEXT | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canvas_length": 0}, "canvas_length must be a whole number from 1"),
        ({"canvas_length": 513}, "canvas_length must be at most max_position_embeddings, 512, got 513"),
        ({"canvas_length": "256"}, "canvas_length must be a whole number"),
        ({"pad_token_id": []}, "pad_token_id must be one token id, got 0"),
        ({"image_token_id": [1, 2]}, "image_token_id must be one token id, got 2"),
        ({"eos_token_id": 64}, "special token id 64 lies outside the vocabulary of 64"),
    ],
    ids=str,
)
def test_impossible_values_at_the_top_are_refused_by_name(changes, message):
    with pytest.raises(CorruptArtifactError, match=message):
        read(TEXT, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"top_k_experts": 5}, "top_k_experts 5 is more than all 4 experts"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_global_key_value_heads": 3}, "4 attention heads cannot share 3 global key/value heads"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, the model has 2"),
        ({"sliding_window": -1}, "sliding_window must be a whole number"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_by_name(changes, message):
    with pytest.raises(CorruptArtifactError, match=message):
        read(TEXT | changes)
