"""Log lines on standard error: time, level, logger, message, then `key=value` of the fields that a record carries."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class KeyValueFormatter(logging.Formatter):
    """Appends the mapping that `extra={"fields": {...}}` brings. Fields that are None are left out."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line without a traceback."""
        line = super().formatMessage(record)
        fields = record.__dict__.get("fields") or {}
        return " ".join([line, *(f"{name}={_quote(value)}" for name, value in fields.items() if value is not None)])


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send everything at `level` or above to `stream` (default: standard error), and nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _quote(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
