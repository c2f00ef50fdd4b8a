"""Compares an answer with what a case expects: a part of it, with a few operators in place of values.

`{"$at_least": n}`, `{"$at_most": n}`, `{"$one_of": [...]}`, `{"$begins": text}`, `{"$begins_of": text}` and
`{"$ends_of": text}` (the answer is a beginning or an end of the text, and not empty), `{"$has": text}`,
`{"$any": true}` (anything but null), `{"$count": n}` (so many entries), `{"$last": …}` (the last entry, in part).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxstream.v1.error_pb2 import ErrorReason

# What two clients may tell differently about the same generation.
UNCOMPARED = frozenset(
    {"id", "seconds", "first_text_seconds", "heartbeats", "added_ms", "messages", "unknown_events", "blocks"}
)
COMPARED_OF_ERROR = ("kind", "code", "reason", "violations")
_REASON_PREFIX = "ERROR_REASON_"


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """What of `found` is not as `expected`, each with its place; what is not expected is not looked at."""
    if isinstance(expected, Mapping):
        if len(expected) == 1 and next(iter(expected)).startswith("$"):
            ((operator, value),) = expected.items()
            return [] if _holds(operator, value, found) else [f"{where}: {found!r} is not {operator[1:]} {value!r}"]
        if not isinstance(found, Mapping):
            return [f"{where}: {found!r} is no object"]
        return [
            one for name, value in expected.items() for one in differences(value, found.get(name), _under(where, name))
        ]
    if isinstance(expected, int | float) and not isinstance(expected, bool) and isinstance(found, int | float):
        return [] if abs(found - expected) < 1e-9 else [f"{where}: {found!r}, not {expected!r}"]
    return [] if found == expected else [f"{where}: {_cut(found)}, not {_cut(expected)}"]


def comparable(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an answer that has to be the same from every client; empty where how much had come is chance."""
    started = dict(answer.get("started") or {})
    started.pop("seed", None)
    error = answer.get("error") or {}
    told_of_error = {name: error.get(name) or None for name in COMPARED_OF_ERROR}
    if f"{_REASON_PREFIX}{error.get('reason')}" not in ErrorReason.keys():  # noqa: SIM118 - not a mapping
        told_of_error["reason"] = None  # the client's own word, where no server spoke
    if answer.get("outcome") in ("left", "failed"):
        return {"outcome": answer["outcome"], "error": told_of_error}
    if answer.get("finish_reason") == "deadline":
        return {"outcome": answer["outcome"], "finish_reason": "deadline"}
    kept = {name: value for name, value in answer.items() if name not in UNCOMPARED and value not in (None, [])}
    return {**kept, "started": started, "error": told_of_error}


def _holds(operator: str, value: Any, found: Any) -> bool:
    if operator not in OPERATORS:
        raise ValueError(f"no such operator: {operator}")
    return OPERATORS[operator](value, [] if found is None and operator == "$count" else found)


OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$any": lambda _value, found: found is not None,
    "$at_least": lambda value, found: found is not None and found >= value,
    "$at_most": lambda value, found: found is not None and found <= value,
    "$one_of": lambda value, found: found in value,
    "$begins": lambda value, found: str(found).startswith(value),
    "$has": lambda value, found: value in str(found),
    "$begins_of": lambda value, found: bool(found) and value.startswith(found),
    "$ends_of": lambda value, found: bool(found) and value.endswith(found),
    "$count": lambda value, found: len(found) == value,
    "$last": lambda value, found: bool(found) and not differences(value, found[-1]),
}


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
