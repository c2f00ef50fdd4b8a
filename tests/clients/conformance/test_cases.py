"""The case file keeps to its own rules, and every scenario that it plays is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[3] / "clients/conformance"
DOCUMENT = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
CASES = DOCUMENT["cases"]
STEPS = {
    "ask",
    "send",
    "mark",
    "answer",
    "account",
    "attempts",
    "server",
    "network",
    "program",
    "pause_seconds",
    "served",
    "load",
    "agree",
    "example",
}
ACTIONS = {"stream", "generate", "burst", "resume", "abort", "health", "watch", "model", "load", "drain", "close"}


def requests() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for case in CASES:
        for step in case["steps"]:
            for key in ("ask", "send"):
                if key in step:
                    yield case, step[key]


def test_names_are_unique_and_say_what_must_hold() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names) > 50
    assert all(case["about"] for case in CASES)


def test_steps_and_actions_are_known() -> None:
    assert all(STEPS & step.keys() for case in CASES for step in case["steps"])
    assert {request["do"] for _, request in requests()} <= ACTIONS


def test_servers_are_described() -> None:
    assert {case.get("server", "plain") for case in CASES} - {"canned"} <= DOCUMENT["servers"].keys()


def test_every_scenario_that_is_played_is_in_the_script() -> None:
    scripts = {
        path.name: json.loads(path.read_text(encoding="utf-8"))["scenarios"] for path in HERE.glob("*script.json")
    }
    played = 0
    for case, request in requests():
        text = json.dumps(request.get("prompt", {}))
        if case.get("server") == "canned":
            continue
        described = DOCUMENT["servers"][case.get("server", "plain")]
        flags = DOCUMENT["servers"][described["like"]]["flags"] if "like" in described else described["flags"]
        script = scripts[next(name for name in scripts if f"script:{{{name.removesuffix('.json')}}}" in flags)]
        for name in re.findall(r"\[\[([\w.-]+)\]\]", text):
            assert name in script, (case["name"], name)
            played += 1
    assert played > 40


def test_no_failure_is_expected() -> None:
    assert json.loads((HERE / "expected_failures.json").read_text(encoding="utf-8")) == []
