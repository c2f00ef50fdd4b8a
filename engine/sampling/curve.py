"""The curve sampler: a monotone cubic through a caller's points maps log-probabilities to logits.

Points are percentages (what the model gives, what is sampled with), taken as natural logarithms of the fractions. The
identity curve is sampling at temperature 1.
Source: Fritsch & Carlson 1980; reference, autoregressive §3.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.contracts.curve_points import LEAST_PERCENT

_Numbers: TypeAlias = NDArray[np.float64]


def curve_logits(logprobs: mx.array, points: Sequence[tuple[float, float]]) -> mx.array:
    """Map scores by the curve through `points`.

    Below the first point the curve is a line with its slope there, but at least 1; above the last, a line with its
    slope there.

    Args:
        logprobs: [..., V] float32, normalised over V.
        points: (x, y) in percent, at least two, whose x differ; in any order.

    Returns:
        Logits [..., V] float32: -inf exactly where `logprobs` is, finite elsewhere.
    """
    percents = np.array(sorted(points), dtype=np.float64)
    x, y = np.log(np.maximum(percents, LEAST_PERCENT) / 100).T
    slopes = _monotone_slopes(x, y)
    first, last = (slopes[0], x[0], y[0]), (slopes[-1], x[-1], y[-1])
    inside = _cubic(logprobs, x, y, slopes)
    below = _line(logprobs, max(first[0], 1.0), *first[1:])
    shaped = mx.where(logprobs < float(x[0]), below, mx.where(logprobs > float(x[-1]), _line(logprobs, *last), inside))
    return mx.where(logprobs == -mx.inf, -mx.inf, shaped)


def _monotone_slopes(x: _Numbers, y: _Numbers) -> _Numbers:
    """The slope at each point: the secant at the ends; 0 at a turn, else a weighted harmonic mean of the secants."""
    widths = np.diff(x)
    secants = np.diff(y) / widths
    before, after = secants[:-1], secants[1:]
    weight_before, weight_after = 2 * widths[1:] + widths[:-1], widths[1:] + 2 * widths[:-1]
    rising = before * after > 0
    inner = np.zeros_like(before)
    mean = weight_before[rising] / before[rising] + weight_after[rising] / after[rising]
    inner[rising] = (weight_before + weight_after)[rising] / mean
    return np.concatenate([secants[:1], inner, secants[-1:]])


def _line(at: mx.array, slope: float, x: float, y: float) -> mx.array:
    return float(y) + float(slope) * (at - float(x))


def _cubic(at: mx.array, x: _Numbers, y: _Numbers, slopes: _Numbers) -> mx.array:
    """The Hermite cubic of the interval that each value lies in; values outside use the nearest interval."""
    width, rise = np.diff(x), np.diff(y)
    left, right = slopes[:-1] * width, slopes[1:] * width
    # y = c0 + c1 t + c2 t² + c3 t³ for t from 0 to 1: one look-up finds all that an interval needs.
    columns = [x[:-1], 1 / width, y[:-1], left, 3 * rise - 2 * left - right, left + right - 2 * rise]
    knots, intervals = (mx.array(numbers.astype(np.float32)) for numbers in (x, np.stack(columns, axis=-1)))
    interval = mx.clip(mx.searchsorted(knots, at, side="right").astype(mx.int32) - 1, 0, len(x) - 2)
    start, scale, c0, c1, c2, c3 = mx.split(intervals[interval], 6, axis=-1)
    t = mx.clip((at[..., None] - start) * scale, 0, 1)
    return mx.squeeze(c0 + t * (c1 + t * (c2 + t * c3)), axis=-1)
