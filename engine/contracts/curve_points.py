"""What the points of a sampling curve must be, so that a monotone cubic runs through them.

A point is (x, y) in percent: the probability that the model gives, and the relative weight it is sampled with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from engine.contracts.errors import FieldViolation
from engine.contracts.ranges import Range

MIN_CURVE_POINTS: Final = 2
MAX_CURVE_POINTS: Final = 1024
LEAST_PERCENT: Final = 1e-9
"""What a percentage below it counts as, zero included: its logarithm is taken."""
_PERCENT: Final = Range(0.0, 100.0)
_LEAST_RATIO: Final = 1.000001


def curve_violations(points: Sequence[tuple[float, float]], path: str) -> list[FieldViolation]:
    """What is wrong with the points at `path`: too few, too many, out of range, or too close to each other."""
    if not MIN_CURVE_POINTS <= len(points) <= MAX_CURVE_POINTS:
        told = f"from {MIN_CURVE_POINTS} to {MAX_CURVE_POINTS} points are needed, got {len(points)}"
        return [FieldViolation(path, told)]
    found = []
    for index, point in enumerate(points):
        for name, percent in zip(("x_percent", "y_percent"), point, strict=True):
            violation = _PERCENT.violation(f"{path}[{index}].{name}", percent)
            found += [] if violation is None else [violation]
    return found or _twins(points, path)


def _twins(points: Sequence[tuple[float, float]], path: str) -> list[FieldViolation]:
    """Each x must be told from the others in single precision."""
    ascending = sorted((max(x, LEAST_PERCENT), index) for index, (x, _) in enumerate(points))
    return [
        FieldViolation(
            f"{path}[{index}].x_percent", f"is too close to that of point {other}: each x needs its own place"
        )
        for (low, other), (high, index) in itertools.pairwise(ascending)
        if high < low * _LEAST_RATIO
    ]
