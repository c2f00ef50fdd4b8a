"""Tone curves against formulas written one token at a time in double precision, and against known values."""

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper, hlg_violations
from engine.sampling.hlg import tone_curve
from engine.sampling.keys import step_key, step_seed

VOCAB = 40
A, B, C, LEAST = 0.17883277, 0.28466892, 0.55991073, 1e-9
CURVES = {
    "straight": HlgParametric(gain=2.0),
    "gain from the temperature": HlgParametric(),
    "soft": HlgParametric(gain=1.5, width=1.0, shoulder=0.5, toe=0.7, pivot_offset=2.5),
    "soft above": HlgParametric(width=0.5, shoulder=0.5, pivot="entropy"),
    "soft below": HlgParametric(width=0.5, toe=0.5, pivot="median"),
    "no width": HlgParametric(width=0.0, toe=0.25),
    "camera": HlgOetf(),
    "display": HlgEotf(),
    "dim display": HlgEotf(lw=10.0),
    "pipeline": HlgPipeline(),
    "bright pipeline": HlgPipeline(max_brightness=80.0, lw=4000.0),
    "film": HlgShaper(),
    "film without a floor": HlgShaper(x_floor=0.0, y_floor=0.0, max_brightness=20.0),
    "film, other": HlgShaper(window=6.0, lw=600.0, x_m=0.7, y_m=0.6, x_floor=0.3, y_floor=0.1, p=3.0, s_m=1.1),
}


def logprobs(seed, *, scale=3.0, masked=0, rows=1):
    generator = np.random.default_rng(seed)
    raw = generator.normal(size=(rows, VOCAB)) * scale
    for row in raw:
        row[generator.permutation(VOCAB)[:masked]] = -np.inf
    top = raw.max(axis=-1, keepdims=True)
    return (raw - top - np.log(np.exp(raw - top).sum(axis=-1, keepdims=True))).astype(np.float32)


def gamma(luminance):
    return 1.2 + 0.42 * math.log10(luminance / 1000)


def camera(light):
    return math.sqrt(3 * light) if light < 1 / 12 else A * math.log(max(12 * light - B, LEAST)) + C


def naive_film(x, s):
    rise = s.x_m - s.x_floor
    toe = (s.y_m - s.s_m * rise - s.y_floor) / rise**s.p
    slope = s.s_m + toe * s.p * rise ** (s.p - 1)
    if x >= s.x_m:
        y = s.y_m + s.shoulder_a * math.log(max(1 + s.s_m / s.shoulder_a * (x - s.x_m), LEAST))
    elif x >= s.x_floor:
        y = s.y_m - s.s_m * (s.x_m - x) - toe * max(s.x_m - x, LEAST) ** s.p
    else:
        det = -(s.x_floor**4)
        cubic = (2 * s.y_floor * s.x_floor - s.x_floor**2 * slope) / det
        square = (s.x_floor**3 * slope - 3 * s.y_floor * s.x_floor**2) / det
        y = cubic * x**3 + square * x**2
    peak = s.y_m + s.shoulder_a * math.log(1 + s.s_m / s.shoulder_a * (1 - s.x_m))
    return max(max(y, 0) / peak, LEAST) ** gamma(s.lw)


def naive_scale(s):
    if s.max_brightness is not None:
        return s.max_brightness
    return s.target_gap / max(1e-6, 1 - naive_film(min(max(1 - s.ref_gap / s.window, 0), 1), s))


def naive_pivot(row, curve):
    finite = np.sort(row[np.isfinite(row)])[::-1]
    if curve.pivot == "top":
        return finite[0] - curve.pivot_offset
    if curve.pivot == "entropy":
        return sum(math.exp(score) * score for score in finite) - curve.pivot_offset
    mass = 0.0
    for score in finite:
        mass += math.exp(score)
        if mass >= 0.5:
            return score - curve.pivot_offset
    raise AssertionError("the masses do not reach one half")


def naive_parametric(score, curve, pivot, temperature):
    gain = 1 / temperature if curve.gain is None else curve.gain
    if curve.width is None or (curve.shoulder <= 0 and curve.toe <= 0):
        return gain * score
    z, w = score - pivot, curve.width
    if z >= w and curve.shoulder > 0:
        return gain * w + gain * curve.shoulder * math.log(max(1 + (z - w) / curve.shoulder, LEAST))
    if z < -w and curve.toe > 0:
        return -gain * w - gain * curve.toe * math.log(max(1 + (-z - w) / curve.toe, LEAST))
    return gain * z


def naive_eotf(below_top, curve):
    signal = math.exp(below_top)
    light = 2 * below_top - math.log(3) if signal < 0.5 else math.log((math.exp((signal - C) / A) + B) / 12)
    return gamma(curve.lw) * light


def naive(row, curve, temperature):
    row = row.astype(np.float64)
    top = row.max()
    shaped = np.full(len(row), -np.inf)
    for token in np.flatnonzero(np.isfinite(row)):
        below = row[token] - top
        match curve:
            case HlgParametric():
                shaped[token] = naive_parametric(row[token], curve, naive_pivot(row, curve), temperature)
            case HlgOetf():
                shaped[token] = math.log(max(camera(math.exp(below)), LEAST))
            case HlgEotf():
                shaped[token] = naive_eotf(below, curve)
            case HlgPipeline():
                shaped[token] = curve.max_brightness * max(camera(math.exp(below)), LEAST) ** gamma(curve.lw)
            case HlgShaper():
                shaped[token] = naive_film(min(max(below / curve.window + 1, 0), 1), curve) * naive_scale(curve)
    return shaped


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
@given(st.integers(0, 10**6), st.sampled_from([0.5, 3.0, 12.0]), st.integers(0, VOCAB - 1))
@settings(max_examples=25, deadline=None)
def test_every_curve_follows_its_formula(curve, seed, scale, masked):
    row = logprobs(seed, scale=scale, masked=masked)[0]
    found = np.array(tone_curve(mx.array(row), curve, temperature=0.7))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, naive(row, curve, 0.7), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
@given(st.integers(0, 10**6), st.integers(1, VOCAB - 1))
@settings(max_examples=15, deadline=None)
def test_masked_tokens_stay_masked_and_the_others_do_not_become_so(curve, seed, masked):
    rows = logprobs(seed, masked=masked, rows=3)
    found = np.array(tone_curve(mx.array(rows), curve, temperature=1.0))
    assert (found[~np.isfinite(rows)] == -np.inf).all()
    assert np.isfinite(found[np.isfinite(rows)]).all()


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
def test_a_row_is_shaped_the_same_in_company(curve):
    rows = mx.array(logprobs(4, rows=5, masked=7))
    together = tone_curve(rows[:, None], curve, temperature=0.9)
    for index in range(5):
        alone = tone_curve(rows[index], curve, temperature=0.9)
        assert mx.array_equal(together[index, 0], alone).item()


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
def test_no_curve_reverses_an_order(curve):
    row = -mx.arange(0, 12, 0.01)
    row = row - mx.logsumexp(row)
    steps = np.diff(np.array(tone_curve(row, curve, temperature=1.0)))
    assert (steps <= 1e-5).all()
    assert (steps < -1e-4).any()


def test_the_film_has_the_known_values():
    shaper = HlgShaper()
    peak = shaper.y_m + shaper.shoulder_a * math.log(1 + shaper.s_m / shaper.shoulder_a * (1 - shaper.x_m))
    assert peak == pytest.approx(0.72465, abs=5e-6)
    assert naive_film(0.6, shaper) == pytest.approx(0.68524, abs=5e-6)
    assert naive_scale(shaper) == pytest.approx(47.656, abs=5e-4)
    row = mx.array([0.0, -4.0])
    top, reference = tone_curve(row, shaper, temperature=1.0).tolist()
    assert top == pytest.approx(47.656, abs=1e-3)
    assert top - reference == pytest.approx(shaper.target_gap, abs=1e-3)
    assert reference == pytest.approx(0.68524 * 47.656, abs=1e-3)


def test_constants_join_the_two_pieces_of_each_curve():
    assert pytest.approx(1 - 4 * A, abs=1e-8) == B
    assert camera(1 / 12) == pytest.approx(0.5, abs=1e-6)
    below, above = (naive_eotf(math.log(signal), HlgEotf()) for signal in (0.5 - 1e-9, 0.5))
    assert below == pytest.approx(above, abs=1e-6)


def test_without_a_width_the_parametric_curve_is_the_temperature():
    row = mx.array(logprobs(2)[0])
    assert mx.allclose(tone_curve(row, HlgParametric(), temperature=0.5), row / 0.5).item()


EXTREMES = [
    *(dataclasses.replace(HlgParametric(width=1.0, shoulder=1.0, toe=1.0), **{name: value})
      for name, limits in HlgParametric.RANGES.items() for value in (limits.low, limits.high)),
    *(HlgParametric(width=0.0, shoulder=1e-3, toe=1e-3, gain=1e3, pivot=pivot) for pivot in ("entropy", "median")),
    *(dataclasses.replace(HlgShaper(), **{name: value})
      for name, limits in HlgShaper.RANGES.items() for value in (limits.low, limits.high)),
    HlgShaper(s_m=1e3, p=1e3, x_floor=0.54, y_m=1e-3, y_floor=1e-3, lw=10_000.0, target_gap=1e3, ref_gap=1e-3),
    HlgPipeline(max_brightness=1000.0, lw=10.0),
    HlgEotf(lw=10_000.0),
]  # fmt: skip


VALID_EXTREMES = [curve for curve in EXTREMES if not hlg_violations(curve, "hlg")]


def test_few_edges_contradict_each_other():
    assert len(VALID_EXTREMES) >= len(EXTREMES) - 5


@pytest.mark.parametrize("curve", VALID_EXTREMES, ids=repr)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_the_edges_of_every_range_give_finite_logits(curve, scale):
    row = logprobs(5, scale=scale, masked=3)[0]
    found = np.array(tone_curve(mx.array(row), curve, temperature=1.0))
    assert np.isfinite(found[np.isfinite(row)]).all()
    assert (found[~np.isfinite(row)] == -np.inf).all()


def test_the_step_keys_that_draw_from_a_curve_have_the_known_values():
    assert step_seed(0, 0) == 0x9E3779B97F4A7C15
    assert step_seed(42, 7) == 0xF1BBCDCBFA53E082
    shaped = tone_curve(mx.array(logprobs(1, rows=1)[0]), HlgPipeline(), temperature=1.0)
    draws = {mx.random.categorical(shaped, key=step_key(42, step)).item() for step in range(30)}
    assert len(draws) > 5
