"""Processors against numpy, written the slow and obvious way; the rules are those that the schema's comments state."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from engine.sampling.processors import process
from engine.sampling.recipe import LARGEST
from tests.engine.sampling.resolved import draw, ids, options

VOCAB = 30
OFF = options()
TOKENS = st.integers(0, VOCAB - 1)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=VOCAB).map(lambda one: tuple(one.items())),
        "repetition_penalty": st.floats(0.1, 5.0),
        "repetition_context_size": st.integers(0, 12),
        "presence_penalty": st.floats(-3, 3),
        "presence_context_size": st.integers(0, 12),
        "frequency_penalty": st.floats(-3, 3),
        "frequency_context_size": st.integers(0, 12),
    },
)
ROWS = st.lists(st.tuples(OPTIONS, st.lists(TOKENS, max_size=15)), min_size=1, max_size=4)


def naive(row, changes, history):
    """One row [V], one token at a time."""
    option = {name: changes.get(name, getattr(OFF, name)) for name in options().__dataclass_fields__}
    row = row.astype(np.float32).copy()

    def window(size):
        return history[len(history) - size :] if size < len(history) else history

    for token, bias in option["logit_bias"]:
        row[token] += np.float32(bias)
    penalty = np.float32(option["repetition_penalty"])
    for token in set(window(option["repetition_context_size"])):
        row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    for token in set(window(option["presence_context_size"])):
        row[token] -= np.float32(option["presence_penalty"])
    for token in window(option["frequency_context_size"]):
        row[token] -= np.float32(option["frequency_penalty"])
    return row


def logits(seed, rows, dtype):
    return mx.array(np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 4).astype(dtype)


@given(st.integers(0, 10**6), ROWS, st.sampled_from([mx.float32, mx.bfloat16]))
@settings(max_examples=150, deadline=None)
def test_rows_together_are_what_the_rules_make_of_each_alone(seed, rows, dtype):
    given_logits = logits(seed, len(rows), dtype)
    draws = [draw(history=history, **changes) for changes, history in rows]
    found = np.array(process(given_logits.astype(mx.float32), draws, None))
    for index, (changes, history) in enumerate(rows):
        wanted = naive(np.array(given_logits[index].astype(mx.float32)), changes, history)
        np.testing.assert_array_equal(found[index], wanted)


@given(st.integers(0, 10**6), ROWS, st.lists(TOKENS, min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_token_that_only_the_device_knows_counts_like_any_other(seed, rows, newest):
    given_logits = logits(seed, len(rows), mx.float32)
    placed = list(zip((2, 0, 3, 1), rows, strict=False))
    known = [draw(history=[*history, newest[place]], **changes) for place, (changes, history) in placed]
    late = [draw(history=history, unread=place, **changes) for place, (changes, history) in placed]
    wanted = process(given_logits, known, None)
    found = process(given_logits, late, mx.array(newest, dtype=mx.uint32))
    assert mx.array_equal(found, wanted)


def test_rows_that_ask_for_nothing_are_not_touched():
    given_logits = logits(1, 2, mx.float32)
    idle = draw(
        history=[1, 2],
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=-0.0,
        repetition_context_size=5,
    )
    assert process(given_logits, [idle, draw()], None) is given_logits


@pytest.mark.parametrize("window", [1, 3, 20, 10**9])
def test_where_the_rules_coincide_mlx_lm_gives_the_same(window):
    history = [3, 5, 3, 7, 3, 9, 9]
    values = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    sizes = {name.replace("penalty", "context_size"): window for name in values}
    wanted = logits(5, 1, mx.float32)
    for processor in make_logits_processors(logit_bias={3: 2.0, 8: -1.0}, **values, **sizes):
        wanted = processor(mx.array(history), wanted)
    found = process(
        logits(5, 1, mx.float32), [draw(history=history, logit_bias=((3, 2.0), (8, -1.0)), **values, **sizes)], None
    )
    assert mx.allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 5.0), ("presence_penalty", 5.0), ("frequency_penalty", 5.0)]
)
def test_a_window_of_zero_penalises_nothing_and_a_wide_one_everything(name, value):
    given_logits = logits(2, 1, mx.float32)
    size = name.replace("penalty", "context_size")
    none = process(given_logits, [draw(history=[1, 1, 1, 1], **{name: value, size: 0})], None)
    assert mx.array_equal(none, given_logits)
    widest = process(given_logits, [draw(history=[4, *range(20)], **{name: value, size: 2**32 - 1})], None)
    assert np.flatnonzero(np.array(widest != given_logits)[0]).tolist() == list(range(20))


def test_an_unset_window_sees_twenty_tokens():
    given_logits = logits(3, 1, mx.float32)
    found = process(given_logits, [draw(history=[29, *[1] * 19, 2], presence_penalty=1.0)], None)
    assert np.flatnonzero(np.array(found != given_logits)[0]).tolist() == [1, 2]


def test_processors_also_act_on_the_greedy_choice():
    row = mx.array([[1.0, 3.0, 2.9, 0.0]])
    assert ids(row, [draw()]) == [1]
    assert ids(row, [draw(history=[1], presence_penalty=0.5)]) == [2]
    assert ids(row, [draw(logit_bias=((3, 10.0),))]) == [3]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e30])
@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": tuple((token, -100.0) for token in range(VOCAB))},
        {"logit_bias": tuple((token, 1e30) for token in range(VOCAB))},
        {"logit_bias": tuple((token, -1e308) for token in range(VOCAB))},
        {"logit_bias": tuple((token, 1e308) for token in range(VOCAB)), "repetition_penalty": 1e-300},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": 5e-324},
        {"presence_penalty": -1e308, "frequency_penalty": -1e308},
        {"presence_penalty": 1e308, "frequency_penalty": 1e308},
    ],
)
def test_no_finite_option_makes_a_score_that_is_not(extreme, temperature):
    one = draw(history=[*range(VOCAB), 3, 3], temperature=temperature, **extreme)
    found = process(logits(4, 1, mx.float32), [one], None)
    assert np.abs(np.array(found)).max() <= LARGEST
    assert ids(logits(4, 1, mx.float32), [one])[0] in range(VOCAB)


def test_fifty_thousand_biases_are_each_applied():
    vocabulary = 50_000
    biases = tuple((token, float(token % 7)) for token in range(vocabulary))
    found = process(mx.zeros((2, vocabulary)), [draw(), draw(logit_bias=biases)], None)
    assert mx.array_equal(found[0], mx.zeros(vocabulary))
    assert mx.array_equal(found[1], mx.arange(vocabulary) % 7)


def test_a_processor_does_not_hide_that_a_row_is_not_finite():
    rows = logits(6, 2, mx.float32)
    rows[0, 4] = mx.nan
    rows[1, 4] = mx.inf
    hidden = draw(history=[4], logit_bias=((4, -5.0),), repetition_penalty=2.0)
    assert ids(rows, [hidden, hidden]) == [None, None]
