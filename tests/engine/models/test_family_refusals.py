"""Every family refuses files that are not what their configuration says, and names what is wrong."""

import json
import re

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.artifacts.artifact import open_artifact
from engine.artifacts.huggingface import model_config
from engine.contracts.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from tests.engine.models import tiny_families, tiny_llama

each_family = pytest.mark.parametrize("family", tiny_families.FAMILIES)


def first_case(family):
    """The configuration of a family's first case, and its tensors as they are stored."""
    changes = next(iter(tiny_families.FAMILIES[family].cases.values()))
    config = tiny_families.config_of(family, changes)
    return config, dict(tree_flatten(tiny_families.build(family, config).parameters()))


def write(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def canonical(name):
    return name.removeprefix("language_model.")


def of_each_kind(tensors):
    """Names of which no two differ by the layer alone."""
    return list({re.sub(r"\d+", "#", name): name for name in tensors}.values())


@each_family
@pytest.mark.parametrize(
    ("name", "served", "refused"),
    [
        ("use_bidirectional_attention", False, True),
        ("quantize_activations", False, True),
        ("position_embedding_type", "rope", "nope"),
        ("lm_head_bias", False, True),
        ("is_causal", True, False),
        ("alibi", False, True),
        ("clip_qkv", None, 8.0),
    ],
)
def test_a_field_that_would_change_the_computation_is_refused_in_values_that_are_not_followed(
    family, name, served, refused
):
    config, _ = first_case(family)
    assert model_config(config | {name: served}) == model_config(config)
    with pytest.raises(UnsupportedArtifactError, match=rf"config\.json: {name} '{refused}' is not supported"):
        model_config(config | {name: refused})


@pytest.mark.parametrize(
    ("family", "name", "served", "refused"),
    [
        ("phi3", "full_attn_mod", 1, 2),
        ("starcoder2", "norm_type", "layer_norm", "rms_norm"),
        ("starcoder2", "mlp_type", "default", "gated"),
        ("llama", "rope_parameters", {"llama_4_scaling_beta": 0}, {"llama_4_scaling_beta": 0.1}),
        ("gemma2", "model_type", "gemma2", "paligemma"),
    ],
)
def test_fields_of_some_families_are_refused_in_values_that_are_not_followed(family, name, served, refused):
    config, _ = first_case(family)
    text = {"text_config": config} if name == "model_type" else config
    model_config(text | {name: served})
    with pytest.raises(UnsupportedArtifactError, match="is not supported"):
        model_config(text | {name: refused})


@each_family
def test_a_missing_tensor_is_named(tmp_path, family):
    config, tensors = first_case(family)
    names = [name for name in of_each_kind(tensors) if not name.endswith("lm_head.weight")]
    assert len(names) >= 8
    for name in names:
        write(tmp_path, config, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(MissingArtifactError, match=re.escape(canonical(name))):
            open_artifact(tmp_path)


@each_family
def test_a_missing_head_of_an_untied_model_is_named(tmp_path, family):
    config, tensors = first_case(family)
    write(
        tmp_path,
        config | {"tie_word_embeddings": False},
        {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")},
    )
    with pytest.raises(MissingArtifactError, match=r"has no lm_head\.weight"):
        open_artifact(tmp_path)


@each_family
def test_a_tensor_of_another_shape_is_named(tmp_path, family):
    config, tensors = first_case(family)
    for name in of_each_kind(tensors):
        write(tmp_path, config, tensors | {name: tensors[name][1:]})
        with pytest.raises(CorruptArtifactError, match=rf"{re.escape(canonical(name))} has the shape"):
            open_artifact(tmp_path)


@each_family
def test_a_tensor_that_nothing_uses_is_named(tmp_path, family):
    config, tensors = first_case(family)
    prefix = "language_model." if next(iter(tensors)).startswith("language_model.") else ""
    for surplus in ("model.layers.0.self_attn.sinks", "model.layers.9.mlp.down_proj.weight", "model.extra.weight"):
        write(tmp_path, config, tensors | {prefix + surplus: mx.zeros((2, 2))})
        with pytest.raises(UnsupportedArtifactError, match=re.escape(surplus)):
            tiny_llama.bind(tmp_path)


@each_family
def test_a_bias_that_is_not_announced_is_named(tmp_path, family):
    config, tensors = first_case(family)
    weight = next(name for name in tensors if name.endswith(("down_proj.weight", "c_fc.weight")))
    bias = weight.removesuffix("weight") + "bias"
    if bias in tensors:
        config = config | {"use_bias": False}
    write(tmp_path, config, tensors | {bias: mx.zeros((tensors[weight].shape[0],))})
    with pytest.raises(CorruptArtifactError, match=r"has \S+\.bias, which the configuration does not announce"):
        open_artifact(tmp_path)


@each_family
def test_rotary_tables_and_the_head_of_a_tied_model_are_dropped(tmp_path, family):
    config, tensors = first_case(family)
    nested = any(name.startswith("language_model.") for name in tensors)
    prefix = "language_model." if nested else ""
    table = tensors[f"{prefix}model.embed_tokens.weight"]
    surplus = {f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros((8,))}
    if f"{prefix}lm_head.weight" not in tensors:
        surplus[f"{prefix}lm_head.weight"] = table
        config = config | {"tie_word_embeddings": True}
    write(tmp_path, config, tensors | surplus)
    assert tiny_llama.bind(tmp_path).weights_bytes == sum(tensor.nbytes for tensor in tensors.values())


def fields_of(config):
    """Every stated field, as (path, value)."""
    for name, value in config.items():
        yield from (
            (((name, *path), inner) for path, inner in fields_of(value))
            if isinstance(value, dict)
            else [((name,), value)]
        )


def with_field(config, path, value):
    inner = value if len(path) == 1 else with_field(config[path[0]], path[1:], value)
    return config | {path[0]: inner}


WRONG_KINDS = ("spiral", "", [], [[1]], {"kind": 1}, -1)


def problem_of(config):
    """What is wrong with a configuration; None if it can be read."""
    try:
        model_config(config)
    except ArtifactError as error:
        return str(error)
    return None


@each_family
def test_every_number_of_a_wrong_kind_is_refused_by_its_name_or_has_no_effect(family):
    refused = set()
    for changes in tiny_families.FAMILIES[family].cases.values():
        config = tiny_families.config_of(family, changes)
        wanted = model_config(config)
        for path, value in fields_of(config):
            for bad in WRONG_KINDS if isinstance(value, bool | int | float) else ():
                damaged = with_field(config, path, bad)
                problem = problem_of(damaged)
                assert path[-1] in problem if problem else model_config(damaged) == wanted, (path, bad)
                refused |= {path[-1]} if problem else set()
    assert refused >= {"hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings"}


@each_family
def test_an_activation_that_the_graph_does_not_have_is_named(family):
    config = tiny_families.config_of(family, {}) | {"hidden_act": "relu", "hidden_activation": None}
    with pytest.raises(UnsupportedArtifactError, match="hidden_act 'relu' is not supported"):
        model_config(config)
