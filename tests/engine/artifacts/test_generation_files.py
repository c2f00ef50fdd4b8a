"""Default options and end tokens: the union of what all of a model's files say."""

import json

import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.huggingface import model_config
from engine.contracts.errors import CorruptArtifactError
from engine.contracts.options import OptionDefaults
from tests.engine.artifacts.tiny_files import CONFIG, write_folder


def parsed(generation=None, **changes):
    return model_config(CONFIG | changes, generation=generation)


def test_option_defaults_come_from_the_generation_configuration():
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "max_new_tokens": 99}
    assert parsed(generation).option_defaults == OptionDefaults(
        max_tokens=99, temperature=0.6, top_p=0.9, top_k=50, min_p=0.05
    )


def test_sampling_defaults_do_not_count_when_sampling_is_off():
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99}
    assert parsed(generation).option_defaults == OptionDefaults(max_tokens=99)
    assert parsed({"temperature": 0.6}).option_defaults == OptionDefaults(temperature=0.6)


@pytest.mark.parametrize(
    "field", [{"temperature": -1}, {"top_p": 1.5}, {"min_p": float("nan")}, {"top_k": 2.5}, {"max_new_tokens": 0}]
)
def test_an_option_default_out_of_range_is_refused_by_file_and_name(field):
    with pytest.raises(CorruptArtifactError, match=f"^generation_config.json: {next(iter(field))} must be"):
        parsed(field)


# End tokens (the union of all sources, in order, without duplicates)


def eos_of(folder, config=None, generation=None, tokenizer_config=None, tokenizer=None):
    write_folder(folder, config={"eos_token_id": config})
    for name, document in (
        ("generation_config.json", generation and {"eos_token_id": generation}),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", tokenizer),
    ):
        if document:
            (folder / name).write_text(json.dumps(document))
    return open_artifact(folder).config.eos_token_ids


def test_end_tokens_are_the_union_of_all_files(tmp_path):
    named = {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}, "3": {"content": "<other>"}}}
    assert eos_of(tmp_path / "int", config=2) == (2,)
    assert eos_of(tmp_path / "list", generation=[7, 2]) == (7, 2)
    assert eos_of(tmp_path / "both", config=5, generation=[7, 2, 5]) == (5, 7, 2)
    assert eos_of(tmp_path / "twice", config=[2, 2, 0]) == (2, 0)
    assert eos_of(tmp_path / "none") == ()
    assert eos_of(tmp_path / "all", config=5, generation=[7], tokenizer_config=named) == (5, 7, 9)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"<end>": 9}}},
        {"model": {"vocab": {"<end>": 9}}},
    ],
)
@pytest.mark.parametrize("eos_token", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_end_token_of_the_tokenizer_is_found_by_its_text(tmp_path, tokenizer, eos_token):
    assert eos_of(tmp_path, 2, tokenizer_config={"eos_token": eos_token}, tokenizer=tokenizer) == (2, 9)


@pytest.mark.parametrize("tokenizer_config", [{"eos_token": None}, {"eos_token": "<gone>"}, {"x": 1}])
def test_an_end_token_that_no_file_knows_adds_nothing(tmp_path, tokenizer_config):
    vocabulary = {"model": {"vocab": {"<end>": 9}}}
    assert eos_of(tmp_path, 2, tokenizer_config=tokenizer_config, tokenizer=vocabulary) == (2,)


@pytest.mark.parametrize("value", [48, [2, 48]])
def test_an_end_token_outside_the_vocabulary_is_refused(value):
    with pytest.raises(CorruptArtifactError, match="id 48 lies outside the vocabulary of 48"):
        parsed(eos_token_id=value)


@pytest.mark.parametrize("value", [-1, "2", [2, None], True, 2.0])
def test_an_end_token_that_is_no_id_is_refused(value):
    with pytest.raises(CorruptArtifactError, match="eos_token_id must be a token id"):
        parsed(eos_token_id=value)
