"""XTC: removes top choices but the least likely of them, protects what it must, and follows its own half of the key."""

import mlx.core as mx
import numpy as np
import pytest

from engine.sampling import filters
from engine.sampling.keys import step_key
from tests.engine.sampling.resolved import draw, ids

ALWAYS = {"temperature": 1.0, "xtc_probability": 1.0}


def logits(*odds):
    return mx.log(mx.array([odds], dtype=mx.float32))


def drawn(row, **change):
    """All ids that 300 draws give."""
    draws = [draw(step, **(ALWAYS | change)) for step in range(300)]
    return set(ids(mx.broadcast_to(row, (300, row.shape[-1])), draws))


def test_the_default_threshold_removes_top_choices_and_not_the_tail():
    row = logits(40, 30, 20, 5, 5)
    assert drawn(row) == {2, 3, 4}


def test_at_most_all_but_the_least_likely_of_the_top_choices_are_removed():
    row = logits(40, 30, 20, 10)
    assert drawn(row, xtc_threshold=0.5) == {0, 1, 2, 3}
    assert drawn(row, xtc_threshold=0.25) == {1, 2, 3}
    assert drawn(row, xtc_threshold=0.0) == {3}


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5])
def test_a_single_top_choice_stays(threshold):
    assert 0 in drawn(logits(91, 3, 3, 3), xtc_threshold=threshold)


def test_of_equal_least_likely_top_choices_all_stay():
    assert drawn(logits(40, 20, 20, 20)) == {1, 2, 3}


def test_protected_tokens_stay_even_as_the_two_top_ones():
    row = logits(40, 30, 20, 10)
    assert drawn(row, xtc_threshold=0.05) == {3}
    assert drawn(row, xtc_threshold=0.05, xtc_special_tokens=(0, 1)) == {0, 1, 3}
    assert drawn(row, xtc_threshold=0.05, xtc_special_tokens=(0, 1, 0)) == {0, 1, 3}
    assert drawn(row, xtc_threshold=0.15, xtc_special_tokens=(0,), top_k=2) == {0, 2}


def test_top_k_counts_what_is_left_however_many_protected_tokens_are_among_the_top_ones():
    row = logits(40, 30, 16, 12, 2)
    assert drawn(row, top_k=1, xtc_special_tokens=(0, 1)) == {0}
    assert drawn(row, top_k=2, xtc_special_tokens=(0, 1)) == {0, 1}
    assert drawn(row, top_k=3, xtc_special_tokens=(0, 1)) == {0, 1, 3}
    assert drawn(row, top_k=1, xtc_special_tokens=(1, 2)) == {1}
    assert drawn(row, top_k=2, xtc_special_tokens=(0, 2)) == {0, 2}


def test_it_works_on_what_top_p_and_min_p_left_and_before_top_k():
    row = logits(40, 30, 20, 10)
    assert drawn(row, top_p=0.65, xtc_threshold=0.5) == {0, 1}
    assert drawn(row, top_p=0.65, xtc_threshold=0.4) == {1}
    assert drawn(row, min_p=0.4, xtc_threshold=0.2) == {2}
    assert drawn(row, top_k=1, xtc_threshold=0.25) == {1}


def test_a_probability_of_zero_changes_nothing():
    rows = mx.random.normal((50, 900), key=mx.random.key(1)) * 3
    plain = ids(rows, [draw(step, temperature=0.9) for step in range(50)])
    off = [draw(step, temperature=0.9, xtc_probability=0.0, xtc_threshold=0.0) for step in range(50)]
    assert ids(rows, off) == plain


def test_the_first_half_of_the_key_decides_and_the_second_draws():
    row = logits(40, 30, 20, 10)
    for step in range(200):
        first, second = mx.random.split(step_key(5, step))
        acts = mx.random.uniform(key=first).item() <= 0.5
        left = filters.xtc(np.array(row[0] - row.max()), 0.25, ()) if acts else np.array(row[0] - row.max())
        wanted = mx.random.categorical(mx.array(left), key=second).item()
        found = ids(row, [draw(step, temperature=1.0, seed=5, xtc_probability=0.5, xtc_threshold=0.25)])
        assert found == [wanted]
