"""Reads JSON objects strictly: each key is asked for once, and what nobody has asked for is an error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class ScriptError(Exception):
    """The script cannot be used; the message names the place."""


class Fields:
    """One object, at the place `where` of its file."""

    def __init__(self, value: Any, where: str) -> None:
        """Take `value`, which must be an object."""
        if not isinstance(value, dict):
            raise ScriptError(f"{where}: must be an object")
        self.where = where
        self._values: dict[str, Any] = value
        self._asked: set[str] = set()

    def names(self) -> list[str]:
        """Keys, in their order."""
        return list(self._values)

    def finish(self) -> None:
        """Raise `ScriptError` for the first key that nobody has asked for."""
        for name in self._values:
            if name not in self._asked:
                raise ScriptError(f"{self.where}: unknown key {name!r}")

    def group(self, name: str) -> Fields:
        """The object under `name`; an empty one where there is none."""
        return Fields(self._take(name, {}), f"{self.where}.{name}")

    def entries(self, name: str) -> list[Any]:
        """The list under `name`; an empty one where there is none."""
        value = self._take(name, [])
        if not isinstance(value, list):
            raise ScriptError(f"{self.where}.{name}: must be a list")
        return value

    def text(self, name: str, default: str) -> str:
        """The text under `name`."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise ScriptError(f"{self.where}.{name}: must be text")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`; the first where nothing is said."""
        value = self.text(name, choices[0])
        if value not in choices:
            raise ScriptError(f"{self.where}.{name}: must be one of {', '.join(choices)}")
        return value

    def flag(self, name: str) -> bool:
        """The truth under `name`; false where nothing is said."""
        value = self._take(name, False)
        if not isinstance(value, bool):
            raise ScriptError(f"{self.where}.{name}: must be true or false")
        return value

    def number(self, name: str, default: float) -> float:
        """The finite number from 0 on under `name`."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ScriptError(f"{self.where}.{name}: must be a number from 0 on")
        return float(value)

    def count(self, name: str, default: int, *, least: int = 0) -> int:
        """The whole number from `least` on under `name`."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ScriptError(f"{self.where}.{name}: must be a whole number from {least} on")
        return value

    def optional_number(self, name: str) -> float | None:
        """As `number`; None where there is none."""
        return self.number(name, 0.0) if name in self._values else None

    def optional_count(self, name: str, *, least: int = 0) -> int | None:
        """As `count`; None where there is none."""
        return self.count(name, least, least=least) if name in self._values else None

    def _take(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        return self._values.get(name, default)
