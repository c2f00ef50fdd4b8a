"""Default options and end tokens: the union of what all of a model's files say."""

import json
import logging

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
    "field",
    [
        {"temperature": -1},
        {"temperature": 1e39},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"temperature": "1.0"},
        {"top_p": 1.5},
        {"min_p": float("nan")},
        {"top_k": 2.5},
        {"top_k": 1e300},
        {"max_new_tokens": 0},
    ],
)
@pytest.mark.parametrize("do_sample", [None, True, False])
def test_an_option_default_out_of_range_is_refused_by_file_and_name(field, do_sample):
    with pytest.raises(CorruptArtifactError, match=f"^generation_config.json: {next(iter(field))} must be"):
        parsed(field | {"do_sample": do_sample})


def test_sampling_that_is_asked_for_without_numbers_has_those_of_hugging_face():
    assert parsed({"do_sample": True}).option_defaults == OptionDefaults(temperature=1.0, top_k=50)
    partly = {"do_sample": True, "temperature": None, "top_p": 0.9}
    assert parsed(partly).option_defaults == OptionDefaults(temperature=1.0, top_k=50, top_p=0.9)
    assert parsed({"do_sample": True, "top_k": 0, "temperature": 0.2}).option_defaults == OptionDefaults(
        temperature=0.2, top_k=0
    )
    assert parsed({"do_sample": None}).option_defaults == OptionDefaults()


# Fields that would change the output, and that we do not apply


def lines_at_opening(folder, caplog, **generation):
    write_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with caplog.at_level(logging.INFO, logger="engine.artifacts"):
        open_artifact(folder)
    return [record.getMessage() for record in caplog.records]


def test_fields_that_are_not_applied_are_named_in_one_line_without_their_values(tmp_path, caplog):
    stated = {
        "repetition_penalty": 1.375,
        "suppress_tokens": [41, 42],
        "stop_strings": ["SECRET"],
        "max_length": 40,
        "forced_eos_token_id": 0,
        "new_in_2031": True,
        "temperature": 0.5,
    }
    (line,) = lines_at_opening(tmp_path, caplog, **stated)
    assert line == (
        "generation_config.json: not applied: "
        "repetition_penalty, suppress_tokens, stop_strings, max_length, forced_eos_token_id, new_in_2031"
    )


def test_fields_that_change_nothing_are_not_worth_a_line(tmp_path, caplog):
    stated = {
        "_from_model_config": True,
        "transformers_version": "4.40.0",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": [2],
        "use_cache": True,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "max_new_tokens": 9,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "stop_strings": None,
        "suppress_tokens": [],
    }
    assert lines_at_opening(tmp_path, caplog, **stated) == []


def test_names_that_are_not_applied_cannot_forge_or_flood_the_log(tmp_path, caplog):
    names = ["a\nERROR forged", "x" * 5000, *(f"field_{index}" for index in range(50))]
    (line,) = lines_at_opening(tmp_path, caplog, **dict.fromkeys(names, 7))
    assert "\n" not in line
    assert line.endswith("and 40 more")
    assert len(line) < 500


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


@pytest.mark.parametrize(
    ("file", "stated"),
    [
        ("config.json", {"config": 9999}),
        ("generation_config.json", {"generation": [2, 9999]}),
        (
            "tokenizer_config.json",
            {"tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"9999": {"content": "<end>"}}}},
        ),
    ],
)
def test_an_end_token_outside_the_vocabulary_is_blamed_on_the_file_that_states_it(tmp_path, file, stated):
    with pytest.raises(
        CorruptArtifactError, match=rf"/{file}: special token id 9999 lies outside the vocabulary of 48"
    ):
        eos_of(tmp_path, **stated)


def test_an_end_token_of_another_shape_is_refused_by_file_and_field(tmp_path):
    with pytest.raises(CorruptArtifactError, match=r"/tokenizer_config\.json: eos_token must be text, .* got 5$"):
        eos_of(tmp_path, 2, tokenizer_config={"eos_token": 5})


@pytest.mark.parametrize("value", [-1, "2", [2, None], True, 2.0])
def test_an_end_token_that_is_no_id_is_refused(value):
    with pytest.raises(CorruptArtifactError, match="eos_token_id must be a token id"):
        parsed(eos_token_id=value)
