"""The acceptance rules of a canvas against naive ones in numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.canvas import Proposal, accept_confident, accept_within_entropy, count_unchanged, token_entropy

QUARTERS = st.integers(0, 8).map(lambda eighths: eighths / 8)


def naive_confident(confidence, unrevealed, threshold):
    """One position after the other, as the rule says."""
    accepted = [hidden and sure >= threshold for sure, hidden in zip(confidence, unrevealed, strict=True)]
    if any(unrevealed) and not any(accepted):
        surest = max(sure for sure, hidden in zip(confidence, unrevealed, strict=True) if hidden)
        first = next(i for i, sure in enumerate(confidence) if unrevealed[i] and sure == surest)
        accepted[first] = True
    return accepted


def naive_within_entropy(entropy, bound):
    """The surest positions first; what counts is the sum of all that were taken before the least sure of them."""
    accepted, taken = [False] * len(entropy), np.float32(0)
    for position in sorted(range(len(entropy)), key=lambda i: (entropy[i], i)):
        total = np.float32(taken + np.float32(entropy[position]))
        if np.float32(total - np.float32(entropy[position])) > np.float32(bound):
            break
        accepted[position], taken = True, total
    return accepted


@given(st.lists(st.tuples(QUARTERS, st.booleans()), min_size=1, max_size=12), QUARTERS)
def test_confident_positions_are_accepted_as_the_naive_rule_does(positions, threshold):
    confidence, unrevealed = zip(*positions, strict=True)
    found = accept_confident(mx.array([confidence]), mx.array([unrevealed]), threshold)
    assert found[0].tolist() == naive_confident(confidence, unrevealed, threshold)


def test_a_confidence_equal_to_the_threshold_is_enough():
    found = accept_confident(mx.array([[0.5, 0.25, 0.75]]), mx.array([[True, True, True]]), 0.5)
    assert found[0].tolist() == [True, False, True]


def test_the_first_of_equally_sure_positions_is_forced_where_none_is_sure_enough():
    found = accept_confident(mx.array([[0.5, 0.25, 0.25]]), mx.array([[False, True, True]]), 0.9)
    assert found[0].tolist() == [False, True, False]


def test_nothing_is_accepted_of_a_canvas_that_is_all_revealed():
    found = accept_confident(mx.array([[0.5, 1.0]]), mx.array([[False, False]]), 0.0)
    assert found[0].tolist() == [False, False]


@given(st.lists(QUARTERS, min_size=1, max_size=12), QUARTERS)
def test_positions_within_the_entropy_are_accepted_as_the_naive_rule_does(entropy, bound):
    found = accept_within_entropy(mx.array([entropy]), bound)
    assert found[0].tolist() == naive_within_entropy(entropy, bound)


def test_the_position_of_least_entropy_is_always_accepted():
    assert accept_within_entropy(mx.array([[3.0, 2.0, 4.0]]), 0.0)[0].tolist() == [False, True, False]


def test_the_sum_of_all_but_the_largest_entropy_may_equal_the_bound():
    assert accept_within_entropy(mx.array([[0.5, 0.25, 9.0]]), 0.75)[0].tolist() == [True, True, True]
    assert accept_within_entropy(mx.array([[0.5, 0.25, 9.0]]), 0.74)[0].tolist() == [True, True, False]


@pytest.mark.parametrize("temperature", [0.4, 0.55, 0.8])
def test_a_proposal_is_what_float64_says_of_the_same_logits(temperature):
    logits = np.random.default_rng(3).normal(0, 4, (1, 6, 50)).astype(np.float32)
    scores = logits.astype(np.float64) / temperature
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    proposal = Proposal.of(mx.array(logits), temperature)
    assert proposal.tokens.dtype == mx.int32
    assert proposal.tokens.tolist() == scores.argmax(-1).tolist()
    np.testing.assert_allclose(np.array(proposal.confidence()), shares.max(-1), rtol=2e-6)
    log_probabilities = proposal.log_probabilities()
    entropy = token_entropy(log_probabilities, mx.exp(log_probabilities))
    np.testing.assert_allclose(np.array(entropy), -(shares * np.log(shares)).sum(-1), rtol=2e-5, atol=2e-6)


def test_scores_are_divided_by_the_temperature_to_the_bit():
    logits = np.random.default_rng(4).normal(0, 4, (1, 64, 64)).astype(np.float32)
    divided = Proposal.of(mx.array(logits), 0.7).scores
    assert np.array_equal(np.array(divided), logits / np.float32(0.7))
    assert not np.array_equal(np.array(divided), logits * np.float32(1 / 0.7)), "the case must tell both apart"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_noticed_wherever_it_stands(bad):
    logits = mx.zeros((1, 3, 5))
    assert Proposal.of(logits, 0.5).is_finite.item()
    logits[0, 1, 4] = bad
    assert not Proposal.of(logits, 0.5).is_finite.item()


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_proposals_are_counted_as_long_as_they_stay_the_same(canvases):
    before = count = None
    for place, canvas in enumerate(canvases):
        newest = mx.array([[canvas, 7]])
        count = count_unchanged(newest, before, count)
        before = newest
        equal = 0
        while equal < place and canvases[place - equal - 1] == canvas:
            equal += 1
        assert count.item() == equal


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e308])
def test_no_temperature_makes_a_score_infinite_or_none(temperature):
    proposal = Proposal.of(mx.array([[[30.0, -30.0, 0.0], [1e-3, 0.0, 0.0]]]), temperature)
    assert proposal.is_finite.item()
    assert mx.isfinite(proposal.confidence()).all().item()
    assert temperature > 1 or proposal.tokens.tolist() == [[0, 0]]
