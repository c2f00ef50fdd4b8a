"""Filters and draws against numpy, written the slow and obvious way."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import filters
from engine.sampling.keys import step_key
from engine.sampling.mass import log_softmax
from engine.sampling.sampler import sample
from tests.engine.sampling.resolved import draw, ids

VOCAB = 40


def logits(seed, rows=1, scale=3.0):
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * scale


def naive_logprobs(row):
    wide = row.astype(np.float64)
    return wide - (np.log(np.exp(wide - wide.max()).sum()) + wide.max())


def kept(filtered):
    return set(np.flatnonzero(np.isfinite(np.array(filtered))).tolist())


@given(st.integers(0, 500), st.floats(0.001, 1.0), st.integers(1, VOCAB + 5))
@settings(max_examples=60, deadline=None)
def test_min_p_removes_what_is_far_below_the_best_but_keeps_the_minimum(seed, ratio, minimum):
    logprobs = naive_logprobs(logits(seed)[0]).astype(np.float32)
    found = kept(filters.min_p(logprobs - logprobs.max(), ratio, minimum))
    order = np.argsort(-logprobs)
    threshold = logprobs.max() + math.log(ratio)
    unsure = set(np.flatnonzero(np.abs(logprobs - threshold) < 1e-5).tolist())
    wanted = set(np.flatnonzero(logprobs >= threshold).tolist()) | set(order[:minimum].tolist())
    assert found - unsure == wanted - unsure


@pytest.mark.parametrize("count", [1, 5, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1])
def test_top_k_keeps_exactly_k_and_everything_at_or_past_the_vocabulary(count):
    logprobs = naive_logprobs(logits(3)[0]).astype(np.float32)
    wanted = set(np.argsort(-logprobs)[: min(count, VOCAB)].tolist())
    assert kept(filters.top_k(logprobs, count)) == wanted


def test_greedy_takes_the_first_of_equal_scores():
    row = mx.zeros((1, VOCAB))
    assert ids(row, [draw()]) == [0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-8, 1e-38])
def test_tiny_temperatures_equal_greedy_in_every_dtype(temperature, dtype):
    rows = mx.array(logits(11, rows=4, scale=30.0)).astype(dtype)
    rows[:, 7] = 200
    greedy = ids(rows, [draw()] * 4)
    assert greedy == [7] * 4
    assert ids(rows, [draw(temperature=temperature)] * 4) == greedy


def test_a_row_draws_the_same_whatever_stands_beside_it():
    rows = mx.array(logits(5, rows=6))
    draws = [
        draw(step, temperature=0.8, seed=seed, top_p=p, top_k=k)
        for seed, p, k, step in [(1, 0, 0, 0), (1, 0.9, 0, 0), (2, 0, 5, 3), (1, 0, 0, 9), (7, 0.5, 3, 1), (0, 0, 0, 0)]
    ]
    draws[3] = draw(9)
    together = ids(rows, draws)
    alone = [ids(rows[index : index + 1], [one])[0] for index, one in enumerate(draws)]
    assert together == alone


def test_the_draw_is_the_categorical_draw_of_the_step_key():
    rows = mx.array(logits(9))
    wanted = mx.random.categorical(log_softmax(rows)[0] / 0.7, key=step_key(123, 4)).item()
    assert ids(rows, [draw(4, temperature=0.7, seed=123)])[0] == wanted


def test_draws_follow_the_distribution():
    rows = mx.array([[0.0, math.log(2), math.log(5)]])
    counts = np.zeros(3)
    for step in range(1600):
        counts[ids(rows, [draw(step, temperature=1.0)])[0]] += 1
    expected = np.array([1, 2, 5]) / 8 * 1600
    assert ((counts - expected) ** 2 / expected).sum() < 13.8, counts


def test_log_softmax_sums_to_one_in_sixteen_bits():
    row = log_softmax(mx.array(logits(2, scale=20.0)).astype(mx.float16))
    assert row.dtype == mx.float32
    assert abs(float(mx.exp(row).sum()) - 1) < 1e-4


@given(st.integers(0, 10**6), st.sampled_from([-9.0, -1.0, 0.0, 0.3, 3.0, 7.9, 15.99, 40.0]), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_greedy_takes_the_first_of_scores_that_rounding_ties(seed, base, spread):
    generator = np.random.default_rng(seed)
    near = np.float32(base) + generator.integers(-spread, 1, size=(2, 5000)).astype(np.float32) * np.float32(2.0**-23)
    rows = mx.array(near)
    wanted = mx.argmax(log_softmax(rows), axis=-1).tolist()
    assert ids(rows, [draw()] * 2) == wanted


@pytest.mark.parametrize("temperature", [1e38, 3.5e38, 1e39, 1e308])
@pytest.mark.parametrize(
    "filtered", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=lambda change: next(iter(change))
)
def test_no_temperature_brings_filtered_tokens_back(temperature, filtered):
    row = mx.full((1, VOCAB), -5.0)
    row[:, 20:22] = 5.0
    draws = [draw(step, temperature=temperature, **filtered) for step in range(30)]
    found = ids(mx.repeat(row, 30, axis=0), draws)
    assert set(found) <= {20, 21}
    if "top_p" not in filtered:
        assert set(found) == {20, 21}


KINDS = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.1, "min_tokens_to_keep": 3},
    "top-k": {"temperature": 0.8, "top_k": 5},
}


@pytest.mark.parametrize("composed", [False, True], ids=["library", "composed"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS.keys())
def test_a_row_whose_logits_are_not_finite_has_no_token_and_its_neighbours_have_theirs(change, dtype, composed):
    sound = mx.array(logits(6, rows=2)).astype(dtype)
    masked = mx.array(logits(7)).astype(dtype)
    masked[:, 1:] = -mx.inf
    bad = [mx.full((1, VOCAB), -mx.inf).astype(dtype)]
    for place in (0, 17, VOCAB - 1):
        for value in (mx.nan, mx.inf):
            row = mx.array(logits(8)).astype(dtype)
            row[:, place] = value
            bad.append(row)
    rows = mx.concatenate([sound[:1], *bad, masked, sound[1:]], axis=0)
    draws = [draw(3, **change)] * rows.shape[0]
    wanted = [ids(sound[row : row + 1], draws[:1], composed=composed)[0] for row in (0, 1)]
    assert ids(rows, draws, composed=composed) == [wanted[0], *[None] * len(bad), 0, wanted[1]]


@pytest.mark.parametrize("size", [VOCAB, 5000], ids=["small", "large"])
def test_rows_that_are_not_finite_disturb_no_kind_of_neighbour(size):
    kinds = [
        *KINDS.values(),
        {"temperature": 0.8, "top_p": 0.9, "top_k": 200, "min_p": 0.01},
        {"temperature": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"curve": ((0.0, 0.0), (100.0, 100.0))},
        {"logprobs": True, "top_logprobs": 5},
        {"presence_penalty": 1.0, "history": (1, 2)},
    ]
    sound = np.random.default_rng(1).normal(size=(len(kinds), size)).astype(np.float32)
    wanted = ids(mx.array(sound), [draw(3, **kind) for kind in kinds])
    for value in (np.nan, np.inf, -np.inf):
        bad = sound.copy()
        bad[:, :: (1 if value < 0 else 7)] = value
        rows = np.stack([sound, bad], axis=1).reshape(-1, size)
        found = ids(mx.array(rows), [draw(3, **kind) for kind in kinds for _ in (0, 1)])
        assert found[0::2] == wanted
        assert found[1::2] == [None] * len(kinds)


def test_one_array_is_read_for_all_rows_and_what_is_off_is_no_part_of_it(monkeypatch):
    rows = mx.array(logits(5, rows=30))
    plain = [draw(step, **kind) for step, kind in enumerate(list(KINDS.values()) * 6)]
    told = [draw(0, logprobs=True, top_logprobs=3), *plain[1:]]
    sampled = [sample(rows, plain), sample(rows, told)]
    reads, real = [], np.array
    monkeypatch.setattr(np, "array", lambda one, *rest, **how: reads.append(one) or real(one, *rest, **how))
    assert [len(one.read()) for one in sampled] == [30, 30]
    assert [one.size for one in reads if isinstance(one, mx.array)] == [2 * 30, 2 * 30 + 1 + 2 * 3]
