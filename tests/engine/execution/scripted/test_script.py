"""A script is read strictly: what it says is what is played, and what it cannot mean is refused at its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.errors import ConfigurationError, NotFoundError
from engine.execution.scripted.fields import ScriptError
from engine.execution.scripted.script import END_ID, FIRST_PIECE_ID, Failure, Moment, parse_script, read_script

ROOT = Path(__file__).resolve().parents[4]


def parsed(say: list[Any], **more: Any) -> Any:
    document = {"scenarios": {"first": {"say": say, **more}}}
    return parse_script(json.dumps(document).encode()).scenarios["first"]


def test_each_distinct_piece_is_a_token_and_a_single_byte_is_itself() -> None:
    scenario = parsed(["one", "two", "one", "x", {"bytes": "f09f"}])
    tokens = [moment.token for moment in scenario.moments]
    assert tokens == [FIRST_PIECE_ID, FIRST_PIECE_ID + 1, FIRST_PIECE_ID, ord("x"), FIRST_PIECE_ID + 2, END_ID]


def test_pauses_stand_before_what_follows_them() -> None:
    scenario = parsed(
        [{"text": "ab", "times": 2, "every_seconds": 0.5}, {"silence_seconds": 2}, "cd", {"silence_seconds": 3}]
    )
    assert [moment.pause_seconds for moment in scenario.moments] == [0.5, 0.5, 2, 3]


def test_a_failure_stands_in_the_place_of_a_token() -> None:
    scenario = parsed(["ab", {"fail": "engine"}])
    assert scenario.moments[1] == Moment(0.0, END_ID, Failure.ENGINE)


def test_after_its_last_moment_a_scenario_has_ended_for_ever() -> None:
    scenario = parsed(["ab"])
    assert scenario.moment(1).token == scenario.moment(100).token == END_ID


def test_a_piece_can_be_copied_and_is_bounded() -> None:
    script = parse_script(json.dumps({"scenarios": {"a": {"say": [{"text": "ab", "copies": 3}]}}}).encode())
    assert script.pieces == (b"ababab",)
    with pytest.raises(ScriptError, match=r"say\[0\]\.copies: a piece has at most"):
        parsed([{"text": "ab", "copies": 10**9}])


def test_the_last_name_in_the_prompt_chooses() -> None:
    script = parse_script(b'{"scenarios": {"a": {"say": ["x"]}, "b.c": {"say": ["y"]}}}')
    assert script.scenario_of(b"[[a]] then [[b.c]] please").name == "b.c"
    assert script.scenario_of(b"nothing").name == "a"
    with pytest.raises(NotFoundError, match=r"no scenario named 'z'; known: a, b\.c"):
        script.scenario_of(b"[[z]]")


def test_a_scenario_named_default_serves_prompts_without_a_name() -> None:
    script = parse_script(b'{"scenarios": {"a": {"say": ["x"]}, "default": {"say": ["y"]}}}')
    assert script.scenario_of(b"nothing").name == "default"


def test_the_end_follows_the_last_canvas_of_the_last_block() -> None:
    document = {"scenarios": {"a": {"blocks": [[["x", "yz"]], [["x"], ["yz"]]], "every_seconds": 1}}}
    script = parse_script(json.dumps(document).encode())
    assert [(one.tokens, one.ends) for one in script.scenarios["a"].revisions] == [
        ((ord("x"), FIRST_PIECE_ID), True),
        ((ord("x"),), False),
        ((FIRST_PIECE_ID, END_ID), True),
    ]
    assert (script.revises, script.canvas_tokens) == (True, 2)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ('{"scenarios": {"a": {"blocks": [[]]}}}', r"blocks\[0\]: must be a list of canvases"),
        ('{"scenarios": {"a": {"blocks": [[[3]]]}}}', r"blocks\[0\]: a canvas holds texts"),
        ('{"scenarios": {"a": {"blocks": [[["x"]]]}, "b": {}}}', "either all have blocks, or none"),
        ("[]", "the script: must be an object"),
        ("{", "not JSON"),
        ("{}", "scenarios: at least one is needed"),
        ('{"scenarios": {"a": {"sey": []}}}', "the script.scenarios.a: unknown key 'sey'"),
        ('{"scenarios": {"a": {"say": [{}]}}}', r"say\[0\]: needs a text"),
        ('{"scenarios": {"a": {"say": [3]}}}', r"say\[0\]: must be an object"),
        ('{"scenarios": {"a": {"say": [{"text": "x", "times": -1}]}}}', r"times: must be a whole number from 0 on"),
        ('{"scenarios": {"a": {"say": [{"text": "x", "times": 2000000}]}}}', r"times: at most 1000000"),
        ('{"scenarios": {"a": {"say": [{"bytes": "zz"}]}}}', "not hexadecimal"),
        ('{"scenarios": {"a": {"say": [{"fail": "all"}]}}}', "must be one of generation, engine"),
        ('{"scenarios": {"a": {"prefill_seconds": -1}}}', "must be a number from 0 on"),
        ('{"scenarios": {"a": {"refuse": {"with": "no"}}}}', "must be one of overloaded, unavailable"),
        (
            '{"model": {"context_tokens": 1}, "scenarios": {"a": {}}}',
            "context_tokens: must be a whole number from 2 on",
        ),
    ],
)
def test_what_is_no_script_is_refused_at_its_place(document: str, problem: str) -> None:
    with pytest.raises(ScriptError, match=problem):
        parse_script(document.encode())


def test_a_file_that_is_not_there_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^engine: none\.json: No such file"):
        read_script(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["script.json", "small_script.json", "canvas_script.json", "durable_script.json"])
def test_the_scripts_of_the_conformance_cases_can_be_read(name: str) -> None:
    assert read_script(ROOT / "clients/conformance" / name).scenarios
