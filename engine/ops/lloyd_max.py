"""The levels that represent a standard normal variable with the least mean squared error.

Each level is the mean of its cell, and cells meet halfway between levels. Solved by Newton's method on the positive
half; the start is the optimum for many levels. Source: Lloyd 1982, "Least squares quantization in PCM"; Max 1960.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

STEPS = 60
TOLERANCE = 1e-13


def normal_levels(bits: int) -> tuple[list[float], list[float]]:
    """The 2**bits levels, ascending, and the 2**bits - 1 boundaries between them."""
    half = _positive_levels(2 ** (bits - 1))
    levels = [*(-level for level in reversed(half)), *half]
    return levels, [(low + high) / 2 for low, high in pairwise(levels)]


def _positive_levels(count: int) -> list[float]:
    levels = np.array([_wide_quantile((index + 0.5) / count) for index in range(count)])
    for _ in range(STEPS):
        residual, slopes = _condition(levels)
        change = np.linalg.solve(slopes, residual)
        largest = float(np.max(np.abs(change) / np.diff(levels, prepend=0.0)))
        levels = levels - change * min(1.0, 0.4 / largest) if largest else levels
        if largest < TOLERANCE:
            break
    return [float(level) for level in levels]


def _condition(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far each level is from the mean of its cell, and the derivatives by the levels."""
    count = len(levels)
    edges = [0.0, *((levels[1:] + levels[:-1]) / 2), math.inf]
    residual, slopes = np.zeros(count), np.eye(count)
    for index, (low, high) in enumerate(pairwise(edges)):
        mass = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
        mean = (_density(low) - _density(high)) / mass
        residual[index] = levels[index] - mean
        for neighbour, slope in (
            (index - 1, _density(low) * (mean - low) / mass),
            (index + 1, 0.0 if high == math.inf else _density(high) * (high - mean) / mass),
        ):
            if 0 <= neighbour < count:
                slopes[index, index] -= slope / 2
                slopes[index, neighbour] -= slope / 2
    return residual, slopes


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _wide_quantile(share: float) -> float:
    """Where `share` of the positive half of a normal variable with three times the variance lies below."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / math.sqrt(6)) < share else (low, middle)
    return low
