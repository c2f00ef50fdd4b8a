"""Ranges of numbers, and what is told about a value outside. Comparing alone would let NaN pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import FieldViolation

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `low` to `high`, both included.

    `above` leaves `low` itself out; `or_zero` takes 0 besides. An infinite bound means that there is none.
    """

    low: float
    high: float
    above: bool = False
    or_zero: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether `value` may stand; negative zero is zero."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.or_zero and value == 0:
            return True
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        """The range in words, such as "from 0 to 1"."""
        low, high = _shown(self.low), _shown(self.high)
        if math.isinf(self.low):
            return "a finite number"
        if math.isinf(self.high):
            words = f"above {low}" if self.above else f"at least {low}"
        else:
            words = f"above {low} and at most {high}" if self.above else f"from {low} to {high}"
        return f"0 or {words}" if self.or_zero else words

    def violation(self, path: str, value: float) -> FieldViolation | None:
        """What is wrong with `value`, which stands at `path`; None if nothing is."""
        if value in self:
            return None
        finite = not isinstance(value, float) or math.isfinite(value)
        return FieldViolation(path, f"must be {self if finite else 'a finite number'}, got {value!r}")


FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127
FINITE_FLOAT32: Final = Range(-FLOAT32_MAX, FLOAT32_MAX)
"""Numbers that stay finite on the device. Source: IEEE 754, binary32."""


def range_violations(ranges: Mapping[str, Range], values: Any, path: str) -> list[FieldViolation]:
    """The violations among the attributes of `values` that `ranges` names; None means unset, and passes."""
    found = []
    for name, allowed in ranges.items():
        value = getattr(values, name)
        if value is not None and (violation := allowed.violation(f"{path}.{name}", value)) is not None:
            found.append(violation)
    return found


def _shown(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
