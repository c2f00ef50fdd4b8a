"""Curves in the sampler: what they take the place of, and that no neighbour notices."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.sampling.curve import curve_logits
from engine.sampling.hlg import tone_curve
from engine.sampling.keys import step_key
from engine.sampling.mass import log_softmax
from engine.sampling.recipe import Draw, Recipe
from tests.engine.sampling.resolved import ids, options

VOCAB = 40
POINTS = ((0.0, 0.0), (5.0, 30.0), (100.0, 60.0))
FILTERS = {"top_k": 1, "top_p": 0.01, "min_p": 0.99}
CURVES = [HlgParametric(gain=0.5), HlgOetf(), HlgEotf(), HlgPipeline(), HlgShaper()]


def rows(count):
    return mx.array(np.random.default_rng(3).normal(size=(count, VOCAB)).astype(np.float32) * 0.2)


def drawn(logits, *wanted, step=4):
    return ids(logits, [Draw(Recipe(options(**one)), step) for one in wanted])


def categorical(logits, *, seed, step=4):
    return mx.random.categorical(logits, key=step_key(seed, step)).item()


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.MODE)
def test_a_tone_curve_draws_with_the_step_key_and_without_the_filters(curve):
    row = rows(1)
    wanted = [
        categorical(tone_curve(log_softmax(row)[0], curve, temperature=0.8), seed=seed, step=4) for seed in range(40)
    ]
    found = [drawn(row, {"hlg": curve, "temperature": 0.8, "seed": seed, **FILTERS})[0] for seed in range(40)]
    assert found == wanted
    assert len(set(found)) > 2


def test_a_curve_draws_with_the_step_key_at_any_temperature_and_without_the_filters():
    row = rows(1)
    wanted = [categorical(curve_logits(log_softmax(row)[0], POINTS), seed=seed) for seed in range(40)]
    for temperature in (0.0, 0.7, 5.0):
        found = [
            drawn(row, {"curve": POINTS, "temperature": temperature, "seed": seed, **FILTERS})[0] for seed in range(40)
        ]
        assert found == wanted
    assert len(set(wanted)) > 2


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.MODE)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6])
def test_a_tone_curve_has_no_effect_at_temperature_zero(curve, temperature):
    row = rows(1)
    assert drawn(row, {"hlg": curve, "temperature": temperature}) == drawn(row, {})


def test_rows_with_curves_and_without_draw_as_they_do_alone():
    wanted = [
        {"curve": POINTS, "seed": 1},
        {},
        {"temperature": 0.9, "seed": 2, "top_k": 4},
        *({"hlg": curve, "temperature": 0.7, "seed": 3} for curve in CURVES),
        {"temperature": 1.2, "seed": 4},
        {"curve": POINTS[1:], "seed": 1},
    ]
    logits = rows(len(wanted))
    alone = [drawn(logits[index : index + 1], one)[0] for index, one in enumerate(wanted)]
    assert drawn(logits, *wanted) == alone


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.MODE)
def test_a_masked_token_is_never_drawn_through_a_tone_curve(curve):
    row = rows(1)
    row[:, 5:] = -mx.inf
    found = {drawn(row, {"hlg": curve, "temperature": 1.0, "seed": seed})[0] for seed in range(60)}
    assert found <= set(range(5))
    assert len(found) > 1
