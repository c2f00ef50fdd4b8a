"""Where the rules coincide, mlx-lm's sampler is the oracle; decision 0007 lists where they differ on purpose."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from engine.sampling import filters
from engine.sampling.keys import step_key
from engine.sampling.mass import log_softmax
from tests.engine.sampling.resolved import draw, ids

SIZE = 5000


@pytest.fixture(autouse=True)
def _uncompiled():
    """Its functions are meant to be compiled, which a test does not need."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def row(seed):
    return log_softmax(mx.random.normal((1, SIZE), key=mx.random.key(seed)) * 3)


def kept(filtered):
    return np.flatnonzero(np.isfinite(np.array(filtered).reshape(-1))).tolist()


def scores(logprobs):
    return np.array(logprobs[0] - mx.max(logprobs))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda one: sample_utils.apply_top_p(one, 0.9), lambda one: filters.top_p(one, 0.9)),
        (lambda one: sample_utils.apply_top_p(one, 0.3), lambda one: filters.top_p(one, 0.3)),
        (lambda one: sample_utils.apply_top_k(one, 40), lambda one: filters.top_k(one, 40)),
        (lambda one: sample_utils.apply_min_p(one, 0.05), lambda one: filters.min_p(one, 0.05, 1)),
        (lambda one: sample_utils.apply_min_p(one, 0.5, 9), lambda one: filters.min_p(one, 0.5, 9)),
        (lambda one: sample_utils.apply_xtc(one, 1.0, 0.01, []), lambda one: filters.xtc(one, 0.01, [])),
        (lambda one: sample_utils.apply_xtc(one, 1.0, 0.01, [3, 5]), lambda one: filters.xtc(one, 0.01, [3, 5])),
    ],
    ids=["top-p 0.9", "top-p 0.3", "top-k", "min-p", "min-p and a minimum", "XTC", "XTC with protected tokens"],
)
def test_each_filter_keeps_the_same_tokens(seed, theirs, ours):
    logprobs = row(seed)
    assert kept(ours(scores(logprobs))) == kept(theirs(logprobs))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 30},
        {"min_p": 0.05, "min_tokens_to_keep": 4},
        {"top_p": 0.8, "min_p": 0.01, "top_k": 20},
    ],
)
def test_with_the_same_key_the_same_tokens_are_drawn(change, monkeypatch):
    """Its draw takes the next key of a global state, in place of which ours is put; see the decision on the shape."""
    for step in range(20):
        key, library = step_key(9, step), mx.random.categorical
        monkeypatch.setattr(mx.random, "categorical", functools.partial(library, key=key))
        theirs = sample_utils.make_sampler(temp=0.8, **change)(row(step)[0]).item()
        monkeypatch.undo()
        assert ids(row(step), [draw(step, temperature=0.8, seed=9, **change)]) == [theirs]
