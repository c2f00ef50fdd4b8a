"""Tone curves that may stand in for temperature and filters: their parameters, defaults and ranges.

Each class is one arm of the schema's `HlgOptions`, and `MODE` its name there. Ranges are those in which single
precision keeps every formula of `engine.sampling.hlg` finite.
Source: reference, autoregressive §3.5 (names, defaults); ITU-R BT.2100-2 (the curves that they come from).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from engine.contracts.errors import FieldViolation
from engine.contracts.ranges import Range, range_violations

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMALLEST: Final = 0.001
_LARGEST: Final = 1000.0
_POSITIVE: Final = Range(_SMALLEST, _LARGEST)
_SOFTNESS: Final = Range(_SMALLEST, _LARGEST, or_zero=True)
_UNIT: Final = Range(0.0, 1.0)
_LUMINANCE: Final = Range(10.0, 10_000.0)
"""cd/m²; the curves' exponent 1.2 + 0.42 log10(L / 1000) stays above 0.3 here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgParametric:
    """A line around a pivot, compressed logarithmically beyond `width`. Units: natural-log scores.

    `gain` None means 1 / temperature, `width` None unbounded; `shoulder` and `toe` of 0 leave their side straight.
    """

    MODE: ClassVar[str] = "parametric"
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType(
        {
            "gain": Range(0.0, _LARGEST),
            "width": Range(0.0, _LARGEST),
            "shoulder": _SOFTNESS,
            "toe": _SOFTNESS,
            "pivot_offset": Range(-_LARGEST, _LARGEST),
        }
    )

    gain: float | None = None
    width: float | None = None
    shoulder: float = 0.0
    toe: float = 0.0
    pivot: Literal["top", "entropy", "median"] = "top"
    pivot_offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgOetf:
    """The camera's transfer function; it has no parameters."""

    MODE: ClassVar[str] = "oetf"
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgEotf:
    """The display's transfer function; `lw` is its peak luminance in cd/m²."""

    MODE: ClassVar[str] = "eotf"
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({"lw": _LUMINANCE})

    lw: float = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgPipeline:
    """Camera and display in sequence, times `max_brightness`; `lw` is the peak luminance in cd/m²."""

    MODE: ClassVar[str] = "pipeline"
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({"max_brightness": _POSITIVE, "lw": _LUMINANCE})

    max_brightness: float = 5.0
    lw: float = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgShaper:
    """A filmic curve over the `window` of scores below the top: cubic floor, power toe, straight middle, log shoulder.

    The floor ends at (`x_floor`, `y_floor`), the shoulder starts at (`x_m`, `y_m`); `s_m` is the slope there, `p` the
    power of the toe, `shoulder_a` the softness of the shoulder. The result is scaled by `max_brightness`, or where
    that is None such that a score `ref_gap` below the top comes to lie `target_gap` below it.
    """

    MODE: ClassVar[str] = "shaper"
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType(
        {
            "window": _POSITIVE,
            "lw": _LUMINANCE,
            "x_m": Range(_SMALLEST, 1.0),
            "y_m": Range(_SMALLEST, 1.0),
            "x_floor": _UNIT,
            "y_floor": _UNIT,
            "p": _POSITIVE,
            "s_m": _POSITIVE,
            "shoulder_a": _POSITIVE,
            "target_gap": _POSITIVE,
            "ref_gap": _POSITIVE,
            "max_brightness": _POSITIVE,
        }
    )

    window: float = 10.0
    lw: float = 1200.0
    x_m: float = 0.55
    y_m: float = 0.5
    x_floor: float = 0.2
    y_floor: float = 0.18
    p: float = 2.0
    s_m: float = 0.7
    shoulder_a: float = 0.35
    target_gap: float = 15.0
    ref_gap: float = 4.0
    max_brightness: float | None = None


HlgCurve: TypeAlias = HlgParametric | HlgOetf | HlgEotf | HlgPipeline | HlgShaper


def hlg_violations(curve: HlgCurve, path: str) -> list[FieldViolation]:
    """What is wrong with the curve that the `HlgOptions` at `path` hold."""
    path = f"{path}.{curve.MODE}"
    found = range_violations(curve.RANGES, curve, path)
    return found or (_shaper_order(curve, path) if isinstance(curve, HlgShaper) else [])


def _shaper_order(shaper: HlgShaper, path: str) -> list[FieldViolation]:
    """The floor must end to the left of the shoulder, and no higher."""
    found = []
    if shaper.x_m - shaper.x_floor < _SMALLEST:
        told = f"must lie {_SMALLEST:g} or more below x_m, which is {shaper.x_m!r}, got {shaper.x_floor!r}"
        found.append(FieldViolation(f"{path}.x_floor", told))
    if shaper.y_floor > shaper.y_m:
        found.append(
            FieldViolation(f"{path}.y_floor", f"must be at most y_m, which is {shaper.y_m!r}, got {shaper.y_floor!r}")
        )
    return found
