"""Typed, bounded reading of the small JSON files beside a model, and of GGUF metadata.

Every refusal names the file and the field. A JSON null counts as absent.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, TypeGuard

from engine.artifacts.model_files import read_file
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

CONFIG_LIMIT_BYTES = 16 * 2**20
TOKENIZER_LIMIT_BYTES = 256 * 2**20
LARGEST_COUNT = 2**31 - 1
_LONGEST_SHOWN_CHARACTERS = 40


def read_object(path: Path, *, limit_bytes: int = CONFIG_LIMIT_BYTES) -> dict[str, object]:
    """Parse the JSON object in `path`.

    Raises:
        MissingArtifactError: there is no such file.
        CorruptArtifactError: it is not a readable JSON object of at most `limit_bytes`.
    """
    return parse_object(path.name, read_file(path, limit_bytes))


def parse_object(file: str, raw: bytes) -> dict[str, object]:
    """Parse `raw` as one JSON object; raises `CorruptArtifactError` naming `file`."""
    document = _parsed(file, raw)
    if not isinstance(document, dict):
        raise CorruptArtifactError(file, f"must hold a JSON object, not {_kind(document)}")
    return document


def parse_list(file: str, raw: bytes) -> list[object]:
    """Parse `raw` as one JSON list; raises `CorruptArtifactError` naming `file`."""
    document = _parsed(file, raw)
    if not isinstance(document, list):
        raise CorruptArtifactError(file, f"must hold a JSON list, not {_kind(document)}")
    return document


def _parsed(file: str, raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise CorruptArtifactError(file, "is not JSON") from None


class Fields:
    """One object's fields, read by name with a type; `file` and `prefix` appear in every error."""

    __slots__ = ("_places", "_prefix", "_values", "file")

    def __init__(self, file: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix
        self._places: dict[str, str] = {}

    def overlaid(self, newer: Fields) -> Fields:
        """These fields with every one that `newer` states laid over them; errors name where each was stated."""
        stated = [name for name in newer if name in newer]
        merged = Fields(self.file, {**self._values, **{name: newer.raw(name) for name in stated}}, self._prefix)
        merged._places = {**self._places, **{name: newer._place(name) for name in stated}}
        return merged

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, name: str, default: object = None) -> object:
        """The value as it stands, a null too; `default` when there is none."""
        return self._values.get(name, default)

    def count(self, name: str, default: int | None = None, *, most: int = LARGEST_COUNT) -> int:
        """A whole number from 1 to `most`; without a `default` it must be there."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise MissingArtifactError(self.file, f"has no {self._place(name)}")
            return default
        if not _is_whole(value) or not 1 <= value <= most:
            raise self.bad(name, f"must be a whole number from 1 to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A finite number, None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not _is_number(value):
            raise self.bad(name, "must be a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; without a `default` it must be there."""
        value = self.optional_number(name)
        if value is None:
            if default is None:
                raise MissingArtifactError(self.file, f"has no {self._place(name)}")
            return default
        if value <= 0:
            raise self.bad(name, "must be above 0")
        return value

    def optional_flag(self, name: str) -> bool | None:
        """A boolean, None when absent."""
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.bad(name, "must be true or false")

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        value = self.optional_flag(name)
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(name, "must be text")
        return value

    def fields(self, name: str) -> Fields | None:
        """A nested object, None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(name, "must be an object")
        return Fields(self.file, value, f"{self._place(name)}.")

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, empty when absent."""
        found = [float(item) for item in self._items(name, "finite numbers") if _is_number(item)]
        if len(found) != len(self._items(name, "finite numbers")):
            raise self.bad(name, "must be a list of finite numbers")
        return tuple(found)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        found = [item for item in self._items(name, "texts") if isinstance(item, str)]
        if len(found) != len(self._items(name, "texts")):
            raise self.bad(name, "must be a list of texts")
        return tuple(found)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them, empty when absent."""
        value = self._values.get(name)
        items = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        found = [item for item in items if _is_whole(item) and 0 <= item <= LARGEST_COUNT]
        if len(found) != len(items):
            raise self.bad(name, "must be a token id or a list of token ids")
        return tuple(found)

    def bad(self, name: str, rule: str) -> CorruptArtifactError:
        """The error for a field that breaks `rule`."""
        return CorruptArtifactError(self.file, f"{self._place(name)} {rule}, got {_shown(self._values.get(name))}")

    def _place(self, name: str) -> str:
        """The dotted path of field `name` in its file."""
        return self._places.get(name, f"{self._prefix}{name}")

    def _items(self, name: str, kind: str) -> tuple[object, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.bad(name, f"must be a list of {kind}")
        return tuple(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def shown_text(text: str) -> str:
    """Text of a file or a caller, cut and escaped so that it cannot write lines of its own into a log or a message."""
    return ascii(text if len(text) <= _LONGEST_SHOWN_CHARACTERS else f"{text[:_LONGEST_SHOWN_CHARACTERS]}...")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
