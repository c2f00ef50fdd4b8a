"""Rows drawn together follow the rules of each, in small and large vocabularies, tails, ties and doubts included."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import drawing
from engine.sampling.cuts import HEAD_TOKENS
from engine.sampling.keys import step_key
from engine.sampling.mass import log_softmax
from engine.sampling.sampler import sample
from tests.engine.sampling import naive
from tests.engine.sampling.resolved import draw, ids

LARGE = 3 * HEAD_TOKENS + 5
CHANGES = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 1.7, 5.0]), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "top_p": st.sampled_from([1e-300, 0.05, 0.5, 0.9, 0.99, 1.0]),
        "top_k": st.sampled_from([0, 1, 2, 40, HEAD_TOKENS - 1, HEAD_TOKENS, HEAD_TOKENS + 1, LARGE, 2**32 - 1]),
        "min_p": st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0]),
        "min_tokens_to_keep": st.sampled_from([1, 2, 50, HEAD_TOKENS + 7, 2**32 - 1]),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.001, 0.02, 0.1, 0.5]),
        "xtc_special_tokens": st.sampled_from([(), (3,), (0, 7, 9)]),
    },
)
SHAPES = st.sampled_from([(40, 1.0), (600, 3.0), (LARGE, 0.3), (LARGE, 2.0), (LARGE, 4.0)])


def rows(seed, count, size, deviation):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32) * np.float32(deviation)


@given(st.integers(0, 10**6), SHAPES, st.lists(CHANGES, min_size=1, max_size=5), st.integers(0, 99), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_row_draws_what_its_own_rules_say(seed, shape, changes, step, composed):
    given_rows = rows(seed, len(changes), *shape)
    draws = [draw(step, **change) for change in changes]
    wanted = [naive.token(row, one.recipe.options, step) for row, one in zip(given_rows, draws, strict=True)]
    assert ids(mx.array(given_rows), draws, composed=composed) == wanted


@given(st.integers(0, 10**6), st.lists(CHANGES, min_size=2, max_size=5), st.sampled_from([mx.bfloat16, mx.float16]))
@settings(max_examples=15, deadline=None)
def test_ties_of_sixteen_bit_logits_are_decided_by_the_rules(seed, changes, dtype):
    given_rows = mx.array(rows(seed, len(changes), LARGE, 1.0)).astype(dtype)
    draws = [draw(5, **change) for change in changes]
    found = ids(given_rows, draws)
    for row, one, token in zip(np.array(given_rows.astype(mx.float32)), draws, found, strict=True):
        assert token == naive.token(row, one.recipe.options, 5)


def test_the_draw_is_the_librarys_categorical_draw_of_the_step_key():
    given_rows = mx.array(rows(3, 8, LARGE, 3.0))
    draws = [draw(step, temperature=0.7, seed=step * 2**60) for step in range(8)]
    wanted = [
        mx.random.categorical(log_softmax(row) / 0.7, key=step_key(step * 2**60, step)).item()
        for step, row in enumerate(given_rows)
    ]
    assert ids(given_rows, draws) == wanted


@pytest.mark.parametrize("change", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}])
def test_what_keeps_a_single_token_equals_greedy(change):
    given_rows = mx.array(rows(4, 20, LARGE, 2.0))
    greedy = ids(given_rows, [draw(step) for step in range(20)])
    assert ids(given_rows, [draw(step, **({"temperature": 1.0} | change)) for step in range(20)]) == greedy


COMMON = {
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 40},
    "min-p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
}


@pytest.mark.parametrize("change", COMMON.values(), ids=COMMON.keys())
def test_common_rows_are_decided_without_the_host(change, monkeypatch):
    """Of 500 draws from rows like a language model's, a few at most lie where float32 leaves a doubt."""
    exact, asked = drawing.draw_exactly, []
    monkeypatch.setattr("engine.sampling.sampler.draw_exactly", lambda *given: asked.append(1) or exact(*given))
    given_rows = mx.array(rows(6, 50, 16_000, 3.0))
    for step in range(10):
        ids(given_rows, [draw(step, temperature=0.8, seed=row, **change) for row in range(50)])
    assert len(asked) < 5


def test_where_the_cut_is_not_known_a_removed_token_is_seldom_the_guess():
    """A tenth of all draws would be; the guess after it is removed as often again."""
    given_rows = mx.array(rows(8, 100, LARGE, 0.3))
    corrected = 0
    for step in range(3):
        sampled = sample(given_rows, [draw(step, temperature=1.0, top_p=0.9, seed=row) for row in range(100)])
        sampled.read()
        corrected += len(sampled.corrected)
    assert corrected <= 9


def test_a_mass_too_small_for_single_precision_still_keeps_the_most_likely_token():
    given_rows = mx.array(rows(9, 20, LARGE, 2.0))
    sampled = sample(given_rows, [draw(step, temperature=1.0, top_p=1e-46) for step in range(20)])
    sampled.read()
    assert sampled.corrected == frozenset()


def test_a_row_draws_the_same_in_any_company():
    given_rows = mx.array(rows(7, 8, LARGE, 2.0))
    draws = [draw(step, temperature=0.9, seed=3, **change) for step, change in enumerate(COMMON.values())]
    draws += [draw(8), draw(9, temperature=0.0, logprobs=True, top_logprobs=3)]
    together = ids(given_rows, draws)
    assert together == [ids(given_rows[row : row + 1], [one])[0] for row, one in enumerate(draws)]
    assert together[::-1] == ids(given_rows[::-1], draws[::-1])
    assert together[1:4] == ids(given_rows[1:4], draws[1:4])


# One in 20,000 correct samplers fails each of these: the 1 - 1/20000 quantiles of chi-square for 7 and 3 degrees of
# freedom. The draws are seeded, so that a test that passes once passes always.
@pytest.mark.parametrize(
    ("change", "weights", "limit"),
    [
        ({"temperature": 0.5}, [1, 4, 9, 16, 25, 36, 49, 64], 31.5),
        (
            {"temperature": 1.0, "top_p": 0.97, "min_p": 0.3, "xtc_probability": 1.0, "xtc_threshold": 0.2, "top_k": 4},
            [0, 0, 0, 4, 5, 6, 7, 0],
            22.5,
        ),
    ],
    ids=["temperature", "every filter"],
)
def test_twenty_thousand_draws_follow_the_distribution(change, weights, limit):
    row = mx.broadcast_to(mx.log(mx.array([1.0, 2, 3, 4, 5, 6, 7, 8])), (1000, 8))
    counts = np.zeros(8)
    for batch in range(20):
        chosen = ids(row, [draw(batch * 1000 + step, seed=11, **change) for step in range(1000)])
        counts += np.bincount(chosen, minlength=8)
    expected = 20_000 * np.array(weights) / np.sum(weights)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < limit
