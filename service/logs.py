"""Log lines on standard error: time, level, logger, message, then the fields that a record carries.

For people as `key=value`; for machines as one JSON object a line, whose times are UTC.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, TextIO, TypeAlias

from service.tracebacks import without_values

ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# What every JSON line has; a field of the same name is put aside as "field_NAME".
OWN_KEYS: Final = ("time", "level", "logger", "message", "exception")


class DiscreetFormatter(logging.Formatter):
    """Tells exceptions by kind and place; what they quote only if it is asked for."""

    def __init__(self, layout: str | None = None, *, with_values: bool = False) -> None:
        super().__init__(layout)
        self._with_values = with_values

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines. What another handler's formatter has made of the exception is not ours, nor ours its."""
        record.exc_text = None
        try:
            return super().format(record)
        finally:
            record.exc_text = None

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - the name is logging's
        """The lines below a message."""
        if self._with_values or ei[1] is None:
            return super().formatException(ei)
        return without_values(ei[1])


class KeyValueFormatter(DiscreetFormatter):
    """Appends the mapping that `extra={"fields": {...}}` brings. Fields that are None are left out."""

    def __init__(self, *, with_values: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", with_values=with_values)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line without a traceback."""
        line = super().formatMessage(record)
        fields = record.__dict__.get("fields") or {}
        return " ".join([line, *(f"{name}={_quote(value)}" for name, value in fields.items() if value is not None)])


class JsonFormatter(DiscreetFormatter):
    """One JSON object for each record, its fields beside the message, a traceback within it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in (record.__dict__.get("fields") or {}).items():
            if value is not None:
                line[f"field_{name}" if name in OWN_KEYS else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, stream: TextIO | None = None, *, as_json: bool = False) -> None:
    """Send everything at `level` or above to `stream` (default: standard error), and nowhere else.

    The level "debug" shows the texts of exceptions too, which may quote prompts and paths.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter if as_json else KeyValueFormatter
    handler.setFormatter(formatter(with_values=level.lower() == "debug"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _quote(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
