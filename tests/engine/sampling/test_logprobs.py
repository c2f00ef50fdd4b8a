"""Log-probabilities: over the whole vocabulary, before the sampler, finite, with the chosen token always listed."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.results import LEAST_LOGPROB, TopLogprob
from engine.sampling.logprobs import most_likely
from engine.sampling.sampler import sample
from tests.engine.sampling.resolved import draw, ids

VOCAB = 500
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 1.5},
    "top-p": {"temperature": 1.5, "top_p": 0.1},
    "XTC": {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    "curve": {"curve": ((1.0, 50.0), (50.0, 1.0))},
}


def rows(seed, count=1, size=VOCAB, deviation=3.0):
    return mx.array(np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32) * deviation)


def told(logits, draws, **how):
    return [one.logprobs for one in sample(logits, draws, **how).read()]


def naive(row):
    wide = np.array(row.astype(mx.float32)).astype(np.float64)
    return wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS.keys())
def test_they_are_the_log_softmax_of_the_row_whatever_the_sampler_does(change, dtype, composed):
    logits = rows(1, 6).astype(dtype)
    draws = [draw(step, logprobs=True, top_logprobs=5, **change) for step in range(6)]
    for row, one in zip(logits, sample(logits, draws, composed=composed).read(), strict=True):
        wanted = naive(row)
        best = np.lexsort((np.arange(VOCAB), -wanted))[:5].tolist()
        listed = [candidate.token for candidate in one.logprobs.top]
        assert listed == (best if one.token in best else [*best, one.token])
        assert one.logprobs.logprob == pytest.approx(wanted[one.token], abs=1e-5)
        assert [candidate.logprob for candidate in one.logprobs.top] == pytest.approx(wanted[listed], abs=1e-5)
        assert all(candidate.logprob <= 0 for candidate in one.logprobs.top)


def test_they_are_measured_after_the_processors():
    logits = rows(2)
    [plain] = told(logits, [draw(logprobs=True)])
    [biased] = told(logits, [draw(logprobs=True, logit_bias=((7, 50.0),))])
    assert plain.logprob < -1e-3
    assert biased.logprob == pytest.approx(0.0, abs=1e-6)


def test_each_flag_stands_alone_and_off_tells_nothing():
    logits = rows(3)
    assert told(logits, [draw()]) == [None]
    [only] = told(logits, [draw(logprobs=True)])
    assert (only.logprob is None, only.top) == (False, ())
    [top] = told(logits, [draw(top_logprobs=2)])
    assert (top.logprob, len(top.top)) == (None, 2)


def test_a_row_gets_what_it_asked_for_beside_rows_that_ask_for_more_or_nothing():
    logits = rows(4, 5)
    asked = [{}, {"logprobs": True}, {"top_logprobs": 20}, {"top_logprobs": 1, "logprobs": True}, {"temperature": 0.5}]
    draws = [draw(step, **one) for step, one in enumerate(asked)]
    together = told(logits, draws)
    assert together == [told(logits[row : row + 1], [one])[0] for row, one in enumerate(draws)]
    assert [0 if one is None else len(one.top) for one in together] == [0, 0, 20, 1, 0]


def test_the_most_likely_of_the_whole_vocabulary_sum_to_one():
    [one] = told(rows(5, size=19), [draw(top_logprobs=20)])
    assert len(one.top) == 19
    assert sum(np.exp(candidate.logprob) for candidate in one.top) == pytest.approx(1.0, abs=1e-6)


def test_impossible_tokens_have_the_least_logprob_and_no_number_is_infinite():
    logits = mx.full((1, 12), -mx.inf)
    logits[:, 4] = 1.0
    [one] = told(logits, [draw(logprobs=True, top_logprobs=3)])
    assert one.logprob == 0.0
    assert one.top == (TopLogprob(4, 0.0), TopLogprob(0, LEAST_LOGPROB), TopLogprob(1, LEAST_LOGPROB))
    [one] = told(rows(6), [draw(top_logprobs=20, logit_bias=((3, 1e30),))])
    assert [candidate.logprob for candidate in one.top][1:] == [LEAST_LOGPROB] * 19


def test_a_token_that_is_decided_on_the_host_has_its_own_logprob():
    """Two scores that rounding ties: the plain choice is the later one."""
    logits = mx.full((1, 8192), 3.0)
    logits[:, 7] = 3.0 + 2.0**-22
    sampled = sample(logits, [draw(logprobs=True, top_logprobs=2)], composed=True)
    [one] = sampled.read()
    assert (sampled.tokens.tolist(), one.token, sampled.corrected) == ([7], 0, {0})
    assert one.logprobs.logprob == pytest.approx(-np.log(8192), abs=1e-4)
    assert [candidate.token for candidate in one.logprobs.top] == [7, 0]


@given(
    st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([5, 20, 319, 320, 321, 1000, 4099]), st.integers(2, 60)
)
@settings(max_examples=60, deadline=None)
def test_the_most_likely_are_found_best_first_and_equals_by_id(seed, count, size, levels):
    scores = np.random.default_rng(seed).integers(0, levels, size=(3, size)).astype(np.float32)
    found = np.array(most_likely(mx.array(scores), min(count, size)))
    for row, places in zip(scores, found, strict=True):
        assert places.tolist() == np.lexsort((np.arange(size), -row))[: min(count, size)].tolist()


def test_scores_of_a_16_bit_graph_are_full_of_equals_and_listed_by_id_all_the_same():
    logits = rows(8, 4, size=9973).astype(mx.bfloat16)
    for row, one in zip(logits, told(logits, [draw(step, top_logprobs=20) for step in range(4)]), strict=True):
        values = np.array(row.astype(mx.float32))
        wanted = np.lexsort((np.arange(values.size), -values))[:20]
        assert len(set(values[wanted].tolist())) < 20
        assert [candidate.token for candidate in one.top] == wanted.tolist()


def test_asking_changes_no_token():
    logits = rows(7, 40)
    for change in KINDS.values():
        asked = ids(logits, [draw(step, logprobs=True, top_logprobs=20, **change) for step in range(40)])
        assert asked == ids(logits, [draw(step, **change) for step in range(40)])
