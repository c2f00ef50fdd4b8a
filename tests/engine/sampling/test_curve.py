"""The curve sampler against a monotone cubic written one value at a time in double precision."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.options import GenerateOptions
from engine.sampling.curve import curve_logits
from engine.sampling.keys import step_key

VOCAB = 50
IDENTITY = ((0.0, 0.0), (100.0, 100.0))


def logprobs(seed, *, scale=3.0, masked=0):
    generator = np.random.default_rng(seed)
    raw = generator.normal(size=VOCAB) * scale
    raw[generator.permutation(VOCAB)[:masked]] = -np.inf
    return (raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())).astype(np.float32)


def naive_slopes(knots):
    secants = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.pairwise(knots)]
    slopes = [secants[0]]
    for index in range(1, len(knots) - 1):
        before, after = secants[index - 1], secants[index]
        if before * after <= 0:
            slopes.append(0.0)
            continue
        left, right = knots[index][0] - knots[index - 1][0], knots[index + 1][0] - knots[index][0]
        w1, w2 = 2 * right + left, right + 2 * left
        slopes.append((w1 + w2) / (w1 / before + w2 / after))
    return [*slopes, secants[-1]]


def naive(score, points):
    knots = sorted((math.log(max(x, 1e-9) / 100), math.log(max(y, 1e-9) / 100)) for x, y in points)
    slopes = naive_slopes(knots)
    if score == -math.inf:
        return -math.inf
    if score < knots[0][0]:
        return knots[0][1] + max(slopes[0], 1) * (score - knots[0][0])
    if score > knots[-1][0]:
        return knots[-1][1] + slopes[-1] * (score - knots[-1][0])
    index = max(i for i in range(len(knots) - 1) if knots[i][0] <= score or i == 0)
    (x0, y0), (x1, y1) = knots[index], knots[index + 1]
    h = x1 - x0
    t = (score - x0) / h
    return (
        (2 * t**3 - 3 * t**2 + 1) * y0
        + (t**3 - 2 * t**2 + t) * h * slopes[index]
        + (-2 * t**3 + 3 * t**2) * y1
        + (t**3 - t**2) * h * slopes[index + 1]
    )


POINTS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=9, unique_by=lambda point: point[0]
).map(lambda points: tuple((x / 10, y / 10) for x, y in points))


@given(POINTS, st.integers(0, 10**6), st.sampled_from([1.0, 4.0, 12.0]), st.integers(0, VOCAB - 1))
@settings(max_examples=150, deadline=None)
def test_values_lie_on_the_monotone_cubic(points, seed, scale, masked):
    row = logprobs(seed, scale=scale, masked=masked)
    GenerateOptions(curve=points)
    found = np.array(curve_logits(mx.array(row), points))
    wanted = np.array([naive(score, points) for score in row.astype(np.float64)])
    # A steep curve magnifies what single precision loses of the score itself.
    knots = sorted((math.log(max(x, 1e-9) / 100), math.log(max(y, 1e-9) / 100)) for x, y in points)
    steepest = 3 * max(abs((y1 - y0) / (x1 - x0)) for (x0, y0), (x1, y1) in itertools.pairwise(knots))
    finite = np.isfinite(row)
    assert (np.abs(found[finite] - wanted[finite]) <= 2e-5 * (1 + steepest) * (1 + np.abs(row[finite]))).all()
    assert (found[~finite] == -np.inf).all()


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_rising_curve_never_reverses_two_tokens(values, seed):
    rising = sorted(values)
    points = tuple((x / 10, y / 10) for x, y in zip(rising, np.cumsum(rising) * 1000 / sum(rising) / 10, strict=True))
    row = np.sort(logprobs(seed))
    assert (np.diff(np.array(curve_logits(mx.array(row), points))) >= -1e-4).all()


def test_the_identity_curve_is_sampling_at_temperature_one():
    row = mx.array(logprobs(7))
    shaped = curve_logits(row, IDENTITY)
    np.testing.assert_allclose(np.array(shaped), np.array(row), atol=1e-5)
    for step in range(40):
        key = step_key(3, step)
        assert mx.random.categorical(shaped, key=key).item() == mx.random.categorical(row, key=key).item()


def test_the_order_in_which_points_come_does_not_matter():
    row, points = mx.array(logprobs(1)), ((1.0, 5.0), (50.0, 20.0), (100.0, 90.0))
    assert mx.array_equal(curve_logits(row, points), curve_logits(row, points[::-1])).item()


def test_the_curve_runs_through_its_points():
    points = ((0.5, 2.0), (3.0, 7.0), (20.0, 8.0), (90.0, 100.0))
    at = mx.array([math.log(x / 100) for x, _ in points])
    wanted = [math.log(y / 100) for _, y in points]
    np.testing.assert_allclose(curve_logits(at, points).tolist(), wanted, atol=2e-5)


def test_beyond_its_points_the_curve_is_a_line():
    points = ((1.0, 10.0), (10.0, 12.0))
    slope = math.log(12 / 10) / math.log(10)
    below, above = curve_logits(mx.array([math.log(0.01) - 5, math.log(0.1) + 2]), points).tolist()
    assert below == pytest.approx(math.log(0.1) - 5, abs=1e-4)
    assert above == pytest.approx(math.log(0.12) + 2 * slope, abs=1e-4)


def test_rows_are_shaped_as_alone():
    rows = mx.stack([mx.array(logprobs(seed, masked=5)) for seed in range(4)])
    points = ((0.0, 0.0), (5.0, 30.0), (100.0, 60.0))
    together = curve_logits(rows[None], points)[0]
    assert all(mx.array_equal(together[index], curve_logits(rows[index], points)).item() for index in range(4))


def test_points_as_close_as_the_ranges_allow_stay_finite():
    points = tuple((50.0 * 1.0000015**index, float(index % 2) * 100) for index in range(300))
    GenerateOptions(curve=points)
    found = np.array(curve_logits(mx.linspace(-30, 0, 5000), points))
    assert np.isfinite(found).all()


def test_a_falling_curve_prefers_the_unlikely_and_keeps_masks():
    row = mx.array(logprobs(2, masked=4))
    shaped = np.array(curve_logits(row, ((0.01, 100.0), (100.0, 0.01))))
    seen = np.isfinite(np.array(row)) & (np.array(row) > math.log(1e-4))
    order = np.argsort(np.array(row)[seen])
    assert (np.diff(shaped[seen][order]) <= 1e-5).all()
    assert (shaped[~np.isfinite(np.array(row))] == -np.inf).all()
