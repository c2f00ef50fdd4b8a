"""Tone curves over log-probabilities [..., V]: what they return is drawn from as logits, with the step's key.

A token that is masked (-inf) stays masked in every mode. Score zero is the likeliest token: d = l - max l.
Source: reference, autoregressive §3.5; ITU-R BT.2100-2 table 5 (constants a, b, c; the knee at 1/12; system gamma).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper

if TYPE_CHECKING:
    from engine.contracts.hlg import HlgCurve

_A = 0.17883277
_B = 0.28466892
_C = 0.55991073
_KNEE = 1 / 12
_LEAST = 1e-9
_LEAST_GAP = 1e-6


def tone_curve(logprobs: mx.array, curve: HlgCurve, *, temperature: float) -> mx.array:
    """Reshape scores.

    Args:
        logprobs: [..., V] float32, normalised over V; each row needs one finite value at least.
        curve: which, and its parameters.
        temperature: above 0; its inverse is the parametric curve's gain where none is set.

    Returns:
        Logits [..., V] float32: -inf exactly where `logprobs` is, finite elsewhere.
    """
    match curve:
        case HlgParametric():
            shaped = _parametric(logprobs, curve, temperature)
        case HlgOetf():
            shaped = mx.log(mx.maximum(_camera(_light(logprobs)), _LEAST))
        case HlgEotf():
            shaped = _eotf(logprobs - _top(logprobs), curve)
        case HlgPipeline():
            shaped = curve.max_brightness * mx.maximum(_camera(_light(logprobs)), _LEAST) ** _gamma(curve.lw)
        case HlgShaper():
            shaped = _shaper(logprobs - _top(logprobs), curve)
    return mx.where(logprobs == -mx.inf, -mx.inf, shaped)


def _top(logprobs: mx.array) -> mx.array:
    return mx.max(logprobs, axis=-1, keepdims=True)


def _light(logprobs: mx.array) -> mx.array:
    """Probability relative to the likeliest, which counts as scene light 1."""
    return mx.exp(logprobs - _top(logprobs))


def _gamma(luminance: float) -> float:
    """System gamma of a display with this peak luminance in cd/m²."""
    return 1.2 + 0.42 * math.log10(luminance / 1000)


def _camera(light: mx.array) -> mx.array:
    """Signal of scene light: a square root up to the knee, a logarithm above."""
    above = _A * mx.log(mx.maximum(12 * light - _B, _LEAST)) + _C
    return mx.where(light < _KNEE, mx.sqrt(3 * light), above)


def _eotf(below_top: mx.array, curve: HlgEotf) -> mx.array:
    """Logarithm of the light that a display makes of the signal e^d."""
    signal = mx.exp(below_top)
    above = mx.log((mx.exp((signal - _C) / _A) + _B) / 12)
    return _gamma(curve.lw) * mx.where(signal < 0.5, 2 * below_top - math.log(3), above)


def _parametric(logprobs: mx.array, curve: HlgParametric, temperature: float) -> mx.array:
    gain = 1 / temperature if curve.gain is None else curve.gain
    if curve.width is None or (curve.shoulder <= 0 and curve.toe <= 0):
        return gain * logprobs
    distance = logprobs - _pivot(logprobs, curve)
    shaped = distance
    if curve.shoulder > 0:
        shaped = mx.where(distance >= curve.width, _compressed(distance, curve.width, curve.shoulder), shaped)
    if curve.toe > 0:
        shaped = mx.where(distance < -curve.width, -_compressed(-distance, curve.width, curve.toe), shaped)
    return gain * shaped


def _compressed(distance: mx.array, width: float, softness: float) -> mx.array:
    """`width` plus the logarithm of what lies beyond."""
    return width + softness * mx.log(mx.maximum(1 + (distance - width) / softness, _LEAST))


def _pivot(logprobs: mx.array, curve: HlgParametric) -> mx.array:
    """[..., 1]: the score at which the curve turns."""
    match curve.pivot:
        case "top":
            base = _top(logprobs)
        case "entropy":
            weighted = mx.where(logprobs == -mx.inf, 0, mx.exp(logprobs) * logprobs)
            base = mx.sum(weighted, axis=-1, keepdims=True)
        case "median":
            descending = -mx.sort(-logprobs, axis=-1)
            half = mx.argmax(mx.cumsum(mx.exp(descending), axis=-1) >= 0.5, axis=-1, keepdims=True)
            base = mx.take_along_axis(descending, half, axis=-1)
    return base - curve.pivot_offset


def _shaper(below_top: mx.array, shaper: HlgShaper) -> mx.array:
    shaped = _film(mx.clip(below_top / shaper.window + 1, 0, 1), shaper)
    if shaper.max_brightness is not None:
        return shaper.max_brightness * shaped
    reference = _film(mx.array(min(max(1 - shaper.ref_gap / shaper.window, 0.0), 1.0)), shaper)
    return shaper.target_gap / mx.maximum(_LEAST_GAP, 1 - reference) * shaped


def _film(x: mx.array, shaper: HlgShaper) -> mx.array:
    """Height of the curve at `x` (0 to 1), relative to its peak, as the display shows it.

    The toe's coefficient is applied to the power of a ratio, and the floor's polynomial to x / x_floor, so that no
    power of a small number is divided by.
    """
    ramp = shaper.s_m / shaper.shoulder_a
    rise = shaper.x_m - shaper.x_floor
    drop = shaper.y_m - shaper.s_m * rise - shaper.y_floor
    below = shaper.x_m - x
    shoulder = shaper.y_m + shaper.shoulder_a * mx.log(mx.maximum(1 - ramp * below, _LEAST))
    toe = shaper.y_m - shaper.s_m * below - drop * (mx.maximum(below, _LEAST) / rise) ** shaper.p
    y = mx.where(x >= shaper.x_m, shoulder, toe)
    if shaper.x_floor > 0:
        slope = shaper.x_floor * (shaper.s_m + drop * shaper.p / rise)
        t = x / shaper.x_floor
        floor = t * t * ((slope - 2 * shaper.y_floor) * t + (3 * shaper.y_floor - slope))
        y = mx.where(x >= shaper.x_floor, y, floor)
    peak = shaper.y_m + shaper.shoulder_a * math.log(1 + ramp * (1 - shaper.x_m))
    return mx.maximum(mx.maximum(y, 0) / peak, _LEAST) ** _gamma(shaper.lw)
