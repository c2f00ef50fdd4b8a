"""What the log tells of an exception: where it passed and of what kind it was, and nothing that it quotes."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.errors import UnavailableError
from service.tracebacks import without_values


def fail(prompt: str) -> None:
    try:
        raise KeyError(prompt)
    except KeyError as error:
        raise FileNotFoundError(2, "No such file", f"/srv/models/{prompt}") from error


def told(function: object, *arguments: str) -> str:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return without_values(error)
    raise AssertionError("nothing was raised")


def test_places_and_kinds_are_told_and_values_are_not() -> None:
    text = told(fail, "my secret prompt")
    lines = text.splitlines()
    assert "secret" not in text
    assert "/" not in text
    assert [line for line in lines if not line.startswith("  ")] == ["KeyError", "FileNotFoundError"]
    assert sum(f"{Path(__file__).name}:" in line and line.endswith("in fail") for line in lines) == 2


def test_errors_made_for_callers_are_told_in_full() -> None:
    def refuse() -> None:
        raise UnavailableError("draining", "the service is shutting down")

    assert told(refuse).endswith("engine.contracts.errors.UnavailableError: the service is shutting down")


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert without_values(one).splitlines() == ["ValueError", "ValueError"]
