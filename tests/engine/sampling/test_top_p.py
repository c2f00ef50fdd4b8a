"""Top-p keeps the set that the rule keeps in float64, tails and ties included."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.filters import top_p
from engine.sampling.mass import log_softmax
from tests.engine.sampling.resolved import draw, ids

TAILS = (0.05, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 1 - 1e-9)


def kept(row, probability):
    return set(np.flatnonzero(np.isfinite(top_p(np.array(row), probability))).tolist())


def kept_by_the_rule(row, probability):
    """Ascending stable sort, cumulative mass c, keep where c > 1 - p; with the ids that float64 leaves in doubt."""
    wide = np.array(row).astype(np.float64)
    wide -= np.log(np.exp(wide).sum())
    order = np.argsort(wide, kind="stable")
    margin = np.cumsum(np.exp(wide[order])) - (1 - probability)
    return set(order[margin > 0].tolist()), set(order[abs(margin) < 1e-13].tolist())


def normal(seed, size, deviation, dtype=mx.float32):
    row = np.random.default_rng(seed).normal(size=size).astype(np.float32) * deviation
    return log_softmax(mx.array(row + 18).astype(dtype))


@pytest.mark.parametrize("probability", TAILS)
@pytest.mark.parametrize(
    ("size", "deviation"), [(600, 2), (5000, 0.01), (49152, 2), (49152, 5), (128256, 2)], ids=lambda value: f"{value:g}"
)
def test_the_tail_is_cut_where_float64_cuts_it(size, deviation, probability):
    row = normal(1, size, deviation)
    wanted, unsure = kept_by_the_rule(row, probability)
    assert len(unsure) < 3
    assert kept(row, probability) - unsure == wanted - unsure


@pytest.mark.parametrize("probability", TAILS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_ties_of_sixteen_bit_logits_are_cut_inside(dtype, probability):
    row = normal(1, 49152, 2, dtype)
    assert len(set(np.array(row).tolist())) < 5000
    wanted, unsure = kept_by_the_rule(row, probability)
    assert len(unsure) < 3
    assert kept(row, probability) - unsure == wanted - unsure


@pytest.mark.parametrize(
    ("size", "probability", "count"),
    [
        (10, 0.05, 1),
        (10, 0.3, 3),
        (10, 0.5, 5),
        (10, 0.9, 9),
        (10, 0.91, 10),
        (49152, 0.05, 2458),
        (49152, 0.5, 24576),
        (49152, 1e-300, 1),
        (49152, 1 - 2**-53, 49152),
    ],
)
def test_of_equal_tokens_the_highest_ids_stay_and_no_more_than_hold_the_mass(size, probability, count):
    assert kept(log_softmax(mx.zeros((size,))), probability) == set(range(size - count, size))


def test_equals_at_the_cut_are_told_apart_by_id_wherever_they_stand():
    row = mx.array([math.log(share) for share in (0.1, 0.2, 0.1, 0.3, 0.1, 0.2)])
    assert kept(row, 0.5) == {3, 5}
    assert kept(row, 0.65) == {1, 3, 5}
    assert kept(row, 0.75) == {1, 3, 4, 5}
    assert kept(row, 0.85) == {1, 2, 3, 4, 5}


@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.001, 0.999), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_any_row_keeps_what_the_rule_keeps(seed, size, probability, levels):
    """Few levels make many ties."""
    row = log_softmax(mx.array(np.random.default_rng(seed).integers(0, levels, size=size).astype(np.float32) / 4))
    wanted, unsure = kept_by_the_rule(row, probability)
    assert kept(row, probability) - unsure == wanted - unsure
    assert wanted - unsure or unsure


def test_a_row_draws_the_same_alone_and_in_company():
    rows = mx.stack([normal(seed, 3000, 2, mx.bfloat16) for seed in range(6)])
    draws = [draw(step, temperature=0.9, top_p=0.7, seed=5) for step in range(6)]
    alone = [ids(rows[index : index + 1], [one])[0] for index, one in enumerate(draws)]
    assert ids(rows, draws) == alone
    for index, token in enumerate(alone):
        assert token in kept(log_softmax(rows[index]), 0.7)
