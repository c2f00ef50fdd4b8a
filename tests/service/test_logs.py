"""Log lines: one per record, with fields that a machine can read."""

from __future__ import annotations

import io
import logging
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
