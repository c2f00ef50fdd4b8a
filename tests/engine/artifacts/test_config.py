"""Hugging Face configurations: every spelling in use, documented defaults, and clear refusals."""

import pytest

from engine.artifacts.huggingface import model_config
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.graph import GraphGeometry
from tests.engine.artifacts.tiny_files import CONFIG


def parsed(**changes):
    document = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    return model_config(document)


def test_a_plain_configuration_gives_its_sizes():
    config = parsed()
    assert config.geometry() == GraphGeometry(
        vocab_size=48,
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context_length=128,
        layer_types=("full_attention", "full_attention"),
    )
    assert (config.model_type, config.intermediate_size, config.norm_eps) == ("llama", 96, 1e-5)
    assert (
        config.layer_ropes[0].kind,
        config.layer_ropes[0].theta,
        config.layer_ropes[0].dims,
        config.layer_ropes[0].traditional,
    ) == (
        "default",
        1e4,
        16,
        False,
    )


def test_absent_fields_have_the_documented_defaults():
    config = parsed(num_key_value_heads=None, rms_norm_eps=None, eos_token_id=None, bos_token_id=None)
    assert (config.kv_heads, config.norm_eps, config.attention_bias, config.mlp_bias) == (4, 1e-6, False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.quantization) == ((), None, None)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "model_type",
    ],
)
def test_a_size_that_is_needed_is_missed_by_name(name):
    with pytest.raises(MissingArtifactError, match=f"^config.json: has no {name}$"):
        parsed(**{name: None})


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, 2**31, [64], float("nan")])
def test_a_size_that_is_no_count_is_refused_with_its_value(value):
    with pytest.raises(CorruptArtifactError, match=r"^config.json: hidden_size must be a whole number from 1"):
        parsed(hidden_size=value)


def test_more_layers_than_any_model_has_are_refused_before_anything_is_allocated():
    with pytest.raises(CorruptArtifactError, match="num_hidden_layers must be a whole number from 1 to 4096"):
        parsed(num_hidden_layers=2**30)


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(CorruptArtifactError, match="4 attention heads cannot share 3"):
        parsed(num_key_value_heads=3)


def test_a_nested_text_configuration_wins_and_the_rest_comes_from_the_top():
    nested = {"hidden_size": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": [5, 2]}
    config = parsed(text_config=nested, tie_word_embeddings=True)
    assert (config.hidden_size, config.context_length, config.tie_word_embeddings, config.heads) == (32, 512, False, 4)
    assert config.eos_token_ids == (2, 5)


def test_a_context_that_is_stated_only_in_the_text_configuration_is_found():
    assert parsed(max_position_embeddings=None, text_config={"max_position_embeddings": 64}).context_length == 64


@pytest.mark.parametrize("name", ["mistral", "iquestcoder"])
def test_aliases_of_a_family_are_read_as_that_family(name):
    assert parsed(model_type=name).model_type == "llama"


@pytest.mark.parametrize("name", ["gpt_neox", "Llama", "llama4"])
def test_an_unknown_model_type_is_refused_by_name(name):
    with pytest.raises(UnsupportedArtifactError, match=f"model_type '{name}' is not supported; supported: llama"):
        parsed(model_type=name)


def test_sliding_layers_keep_their_window_and_full_ones_alone_have_none():
    mixed = parsed(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    assert (mixed.layer_types, mixed.sliding_window) == (("sliding_attention", "full_attention"), 16)
    assert parsed(sliding_window=16).sliding_window == 0
    with pytest.raises(MissingArtifactError, match="has no sliding_window"):
        parsed(layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CorruptArtifactError, match="names 1 layers, the model has 2"):
        parsed(layer_types=["full_attention"])
    with pytest.raises(UnsupportedArtifactError, match="'linear_attention'"):
        parsed(layer_types=["full_attention", "linear_attention"])


def test_mistral_slides_over_all_layers_when_it_states_a_window_alone():
    mistral = parsed(model_type="mistral", sliding_window=16)
    assert (mistral.layer_types, mistral.sliding_window) == (("sliding_attention",) * 2, 16)
    assert parsed(model_type="mistral").sliding_window == 0
    stated = parsed(model_type="mistral", sliding_window=16, layer_types=["full_attention"] * 2)
    assert (stated.layer_types, stated.sliding_window) == (("full_attention",) * 2, 0)


def test_a_window_as_wide_as_the_context_is_full_attention():
    wide = parsed(model_type="mistral", sliding_window=128)
    assert (wide.layer_types, wide.sliding_window) == (("full_attention",) * 2, 0)


@pytest.mark.parametrize("value", [0, -8, "8", 1.5])
def test_a_window_that_is_no_count_is_refused(value):
    with pytest.raises(CorruptArtifactError, match="sliding_window must be a whole number from 1"):
        parsed(model_type="mistral", sliding_window=value)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu", "SiLU"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_another_activation_is_refused_by_name(family, name):
    with pytest.raises(UnsupportedArtifactError, match=f"^config.json: hidden_act '{name}' is not supported"):
        parsed(model_type=family, hidden_act=name)


@pytest.mark.parametrize("name", ["silu", "swish", None])
def test_the_activation_of_the_family_is_read_under_both_names(name):
    assert parsed(hidden_act=name).model_type == "llama"


def test_a_number_too_large_for_any_float_is_refused_like_infinity():
    with pytest.raises(CorruptArtifactError, match="rms_norm_eps must be a finite number"):
        parsed(rms_norm_eps=10**400)


# Rotary parameters


def test_two_spellings_of_a_rotation_must_agree():
    both = {"type": "su", "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    assert parsed(rope_scaling=both).layer_ropes[0].kind == "longrope"
    with pytest.raises(CorruptArtifactError, match="type 'linear', rope_type 'llama3'"):
        parsed(rope_scaling={"type": "linear", "rope_type": "llama3", "factor": 4.0})


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_the_kind_of_rotation_is_read_in_every_spelling(spelling, place):
    rope = parsed(**{place: {spelling: "linear", "factor": 2.0}}).layer_ropes[0]
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_theta_is_read_at_the_top_and_inside_the_parameters():
    assert parsed(rope_theta=500000.0).layer_ropes[0].theta == 500000.0
    assert parsed(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).layer_ropes[0].theta == 1e6


@pytest.mark.parametrize("newer", [{}, {"rope_theta": 5e5}, {"rope_type": None}])
def test_newer_parameters_without_a_kind_leave_the_older_scaling_standing(newer):
    rope = parsed(rope_parameters=newer, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e4).layer_ropes[0]
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, newer.get("rope_theta", 1e4))


def test_newer_parameters_win_over_the_older_scaling_field_by_field():
    older = {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = parsed(rope_parameters={"rope_type": "yarn", "factor": 2.0}, rope_scaling=older).layer_ropes[0]
    assert (rope.kind, rope.factor, rope.original_context_length) == ("yarn", 2.0, 64)


def test_newer_parameters_that_state_no_scaling_win_over_an_older_one():
    assert (
        parsed(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "yarn"}).layer_ropes[0].kind == "default"
    )


def test_a_fault_in_merged_parameters_names_the_place_that_states_it():
    with pytest.raises(CorruptArtifactError, match=r"rope_scaling\.factor must be above 0"):
        parsed(rope_parameters={"rope_theta": 1e4}, rope_scaling={"type": "linear", "factor": 0})
    with pytest.raises(CorruptArtifactError, match=r"rope_parameters\.factor must be above 0"):
        parsed(rope_parameters={"factor": -1}, rope_scaling={"type": "linear", "factor": 4})


def test_yarn_keeps_its_stated_attention_factor_and_correction_range():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert (
        parsed(rope_scaling=yarn).layer_ropes[0].attention_factor,
        parsed(rope_scaling=yarn).layer_ropes[0].truncate,
    ) == (None, True)
    rope = parsed(rope_scaling=yarn | {"attention_factor": 0.5, "truncate": False}).layer_ropes[0]
    assert (rope.attention_factor, rope.truncate) == (0.5, False)
    with pytest.raises(CorruptArtifactError, match=r"rope_scaling\.attention_factor must be above 0"):
        parsed(rope_scaling=yarn | {"attention_factor": 0})
    with pytest.raises(CorruptArtifactError, match=r"rope_scaling\.truncate must be true or false"):
        parsed(rope_scaling=yarn | {"truncate": 1})


def test_llama3_rotation_has_its_parameters_and_defaults():
    rope = parsed(rope_scaling={"rope_type": "llama3", "factor": 32.0}).layer_ropes[0]
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_context_length) == (32, 1, 4, 8192)
    stated = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}
    rope = parsed(rope_scaling=stated).layer_ropes[0]
    assert (rope.low_freq_factor, rope.original_context_length) == (2.0, 64)


@pytest.mark.parametrize("name", ["yarn", "deepseek_yarn", "telechat3-yarn"])
def test_yarn_is_read_under_all_its_names(name):
    rope = parsed(rope_scaling={"type": name, "factor": 4, "mscale_all_dim": 1.0}).layer_ropes[0]
    assert (rope.kind, rope.factor, rope.original_context_length) == ("yarn", 4, 4096)
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim) == (32, 1, 1, 1)


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_has_a_factor_for_every_pair(name):
    factors = [1.0 + index for index in range(8)]
    stated = {"type": name, "short_factor": [1.0] * 8, "long_factor": factors}
    rope = parsed(rope_scaling=stated, original_max_position_embeddings=64).layer_ropes[0]
    assert (rope.kind, rope.long_factor, rope.original_context_length) == ("longrope", tuple(factors), 64)
    with pytest.raises(CorruptArtifactError, match="long_factor holds 3 factors, 8 pairs rotate"):
        parsed(rope_scaling=stated | {"long_factor": [1.0] * 3})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_a_kind_that_needs_a_factor_misses_it_by_name(kind):
    with pytest.raises(MissingArtifactError, match=r"has no rope_scaling\.factor"):
        parsed(rope_scaling={"type": kind})


@pytest.mark.parametrize("kind", ["mrope", "spiral"])
def test_an_unknown_kind_of_rotation_is_refused_by_name(kind):
    with pytest.raises(UnsupportedArtifactError, match=f"kind '{kind}'"):
        parsed(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_layer_types_may_rotate_each_in_their_own_way():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    full, sliding = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_theta": 1e4}
    ropes = parsed(rope_parameters={"full_attention": full, "sliding_attention": sliding}, **kinds).layer_ropes
    assert [(rope.kind, rope.theta, rope.factor) for rope in ropes] == [("default", 1e4, 1.0), ("linear", 1e6, 8.0)]
    older = parsed(rope_theta=1e6, rope_scaling=full, rope_local_base_freq=1e4, **kinds).layer_ropes
    assert [(rope.kind, rope.theta, rope.factor) for rope in older] == [("default", 1e4, 1.0), ("linear", 1e6, 8.0)]
    with pytest.raises(MissingArtifactError, match="rope_parameters has none for sliding_attention"):
        parsed(rope_parameters={"full_attention": full}, **kinds)


@pytest.mark.parametrize(
    "field", [{"rope_theta": 0}, {"rope_theta": "1e4"}, {"rope_scaling": {"type": "linear", "factor": -1}}]
)
def test_a_rotary_parameter_out_of_range_is_refused(field):
    with pytest.raises(CorruptArtifactError, match=r"rope_theta|factor"):
        parsed(**field)


def test_a_part_of_a_head_rotates_when_a_fraction_is_stated():
    assert parsed(partial_rotary_factor=0.5).layer_ropes[0].dims == 8
    proportional = parsed(rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25}).layer_ropes[0]
    assert (proportional.dims, proportional.partial_rotary_factor) == (16, 0.25)
    with pytest.raises(CorruptArtifactError, match="rotates 1"):
        parsed(partial_rotary_factor=0.1)
