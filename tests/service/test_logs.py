"""Log lines: one per record, with fields that a machine can read."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from service.logs import configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("info", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_fields_follow_the_message_and_empty_ones_are_left_out(stream: io.StringIO) -> None:
    logging.getLogger("service").info("done", extra={"fields": {"request_id": "r-1", "error": None, "tokens": 3}})
    assert stream.getvalue().endswith(" INFO service: done request_id=r-1 tokens=3\n")


def test_a_value_cannot_break_out_of_its_line(stream: io.StringIO) -> None:
    logging.getLogger("service").info("done", extra={"fields": {"name": 'a "b"\nINFO service: forged=1', "empty": ""}})
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith('name="a \\"b\\"\\nINFO service: forged=1" empty=""\n')


def test_lines_below_the_level_are_dropped(stream: io.StringIO) -> None:
    logging.getLogger("service").debug("quiet")
    assert stream.getvalue() == ""


@pytest.fixture
def json_lines(stream: io.StringIO) -> io.StringIO:
    configure_logging("info", stream, as_json=True)
    return stream


def test_as_json_a_record_is_one_object_with_its_fields_beside_the_message(json_lines: io.StringIO) -> None:
    fields = {"request_id": 'r"1\n', "error": None, "tokens": 3, "message": "forged"}
    logging.getLogger("service").info("done", extra={"fields": fields})
    assert json_lines.getvalue().count("\n") == 1
    line = json.loads(json_lines.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        "level": "info", "logger": "service", "message": "done", "request_id": 'r"1\n', "tokens": 3,
        "field_message": "forged",
    }  # fmt: skip


def test_as_json_a_traceback_stays_within_its_object(json_lines: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("service").exception("it failed")
    line = json.loads(json_lines.getvalue())
    assert (line["level"], line["message"]) == ("error", "it failed")
    assert line["exception"].endswith("\nRuntimeError")


def test_another_handlers_traceback_is_neither_taken_over_nor_cut_short(stream: io.StringIO) -> None:
    plain, quoted = io.StringIO(), "a prompt"
    for place in (0, 2):
        logging.getLogger().handlers.insert(place, logging.StreamHandler(plain))
    try:
        raise KeyError(quoted)
    except KeyError:
        logging.getLogger("service").exception("it failed")
    assert quoted not in stream.getvalue()
    assert plain.getvalue().count("KeyError: 'a prompt'") == 2


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_what_an_exception_quotes_is_shown_only_when_it_is_asked_for(
    stream: io.StringIO, level: str, shown: bool, as_json: bool
) -> None:
    configure_logging(level, stream, as_json=as_json)
    try:
        raise KeyError("a secret prompt")
    except KeyError:
        logging.getLogger("service").exception("it failed")
    assert ("a secret prompt" in stream.getvalue()) == shown
    assert "KeyError" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()
