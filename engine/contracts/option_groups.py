"""Groups of options that are messages of their own in the public schema; each knows its own ranges.

`violations(path)` says what is wrong with the group that stands at `path`. None means unset.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from engine.contracts.errors import FieldViolation
from engine.contracts.ranges import FINITE_FLOAT32, Range, range_violations

if TYPE_CHECKING:
    from collections.abc import Mapping

UINT32_MAX: Final = 2**32 - 1
MAX_LABEL_CHARACTERS: Final = 256
MAX_CHOICES: Final = 1024
_COUNT: Final = Range(1, UINT32_MAX)
_ANY_COUNT: Final = Range(0, UINT32_MAX)
_NOT_NEGATIVE: Final = Range(0.0, float("inf"))
_PROBABILITY: Final = Range(0.0, 1.0)


def label_violations(label: str | None, path: str) -> list[FieldViolation]:
    """What is wrong with a name of the caller's making: its length alone."""
    if label is None or len(label) <= MAX_LABEL_CHARACTERS:
        return []
    return [FieldViolation(path, f"at most {MAX_LABEL_CHARACTERS} characters are allowed, got {len(label)}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSelection:
    """One mounted adapter, with an optional scale that replaces its own."""

    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({"scale": FINITE_FLOAT32})

    id: str
    scale: float | None = None

    def violations(self, path: str) -> list[FieldViolation]:
        """An id is needed; the scale is any number that is finite on the device."""
        nameless = [] if self.id else [FieldViolation(f"{path}.id", "must not be empty")]
        return [*nameless, *label_violations(self.id, f"{path}.id"), *range_violations(self.RANGES, self, path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Structured output: one kind and its source text; `choices` is for kind "choice" alone."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    source: str = ""
    choices: tuple[str, ...] = ()

    def violations(self, path: str) -> list[FieldViolation]:
        """What can be said without compiling: a source is needed, and choices that can be told from each other."""
        if self.kind == "json_object":
            return []
        if self.kind != "choice":
            return [] if self.source else [FieldViolation(f"{path}.{self.kind}", "must not be empty")]
        return self._choice_violations(f"{path}.choice.choices")

    def _choice_violations(self, path: str) -> list[FieldViolation]:
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            return [FieldViolation(path, f"from 1 to {MAX_CHOICES} are allowed, got {len(self.choices)}")]
        found = []
        for index, choice in enumerate(self.choices):
            if not choice:
                found.append(FieldViolation(f"{path}[{index}]", "must not be empty"))
            elif any(unicodedata.category(character) == "Cc" for character in choice):
                found.append(FieldViolation(f"{path}[{index}]", "must hold no control characters"))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Prefix-store behaviour of one request."""

    bypass: bool = False
    salt: str = ""

    def violations(self, path: str) -> list[FieldViolation]:
        """The salt is bounded."""
        return label_violations(self.salt, f"{path}.salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding: tokens to draft per round, and the name of the source."""

    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({"draft_tokens": _ANY_COUNT})

    draft_tokens: int | None = None
    source: str | None = None

    def violations(self, path: str) -> list[FieldViolation]:
        """Counts fit the schema's numbers; the name is bounded."""
        return [*range_violations(self.RANGES, self, path), *label_violations(self.source, f"{path}.source")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingOptions:
    """Knobs of the block-diffusion method; None means the method's default."""

    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType(
        {
            "max_denoising_steps": _COUNT,
            "min_canvas_length": _COUNT,
            "max_canvas_length": _COUNT,
            "threshold": _PROBABILITY,
            "entropy_bound": _NOT_NEGATIVE,
            "t_min": Range(0.0, float("inf"), above=True),
            "t_max": Range(0.0, float("inf"), above=True),
            "stability_threshold": _ANY_COUNT,
            "confidence_threshold": _NOT_NEGATIVE,
        }
    )
    DEFAULT_T_MIN: ClassVar[float] = 0.4
    DEFAULT_T_MAX: ClassVar[float] = 0.8

    max_denoising_steps: int | None = None
    min_canvas_length: int | None = None
    max_canvas_length: int | None = None
    full_canvas: bool | None = None
    sampler: Literal["confidence-threshold", "entropy-bound"] | None = None
    threshold: float | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None

    def violations(self, path: str) -> list[FieldViolation]:
        """Ranges, and bounds that contradict each other."""
        return range_violations(self.RANGES, self, path) or self._contradictions(path)

    def _contradictions(self, path: str) -> list[FieldViolation]:
        found = []
        low = self.DEFAULT_T_MIN if self.t_min is None else self.t_min
        high = self.DEFAULT_T_MAX if self.t_max is None else self.t_max
        if low > high:
            field = "t_max" if self.t_max is not None else "t_min"
            found.append(FieldViolation(f"{path}.{field}", f"t_min must be at most t_max, got {low!r} and {high!r}"))
        shortest, longest = self.min_canvas_length, self.max_canvas_length
        if shortest is not None and longest is not None and shortest > longest:
            told = f"must be at most max_canvas_length, which is {longest}, got {shortest}"
            found.append(FieldViolation(f"{path}.min_canvas_length", told))
        return found
