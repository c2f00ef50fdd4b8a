"""Static ranges of every option, checked on construction and named by their schema path."""

import math

import pytest

from engine.contracts.errors import InvalidRequestError
from engine.contracts.options import GenerateOptions

NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]


def violations(**values):
    with pytest.raises(InvalidRequestError) as caught:
        GenerateOptions(**values)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(name, value):
    assert violations(**{name: value}) == [f"options.{name}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", -1e-45),
        ("top_p", 1.0000001),
        ("top_p", -0.1),
        ("min_p", 1.0000001),
        ("xtc_threshold", 0.51),
        ("xtc_probability", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("prefill_chunk_size", 0),
        ("min_tokens_to_keep", 0),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("top_logprobs", 21),
        ("checkpoint_every_tokens", 0),
    ],
)
def test_values_outside_their_range_are_refused_by_name(name, value):
    assert violations(**{name: value}) == [f"options.{name}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.0),
        ("temperature", 1e-45),
        ("temperature", 1e300),
        ("top_p", 0.0),
        ("top_p", 1.0),
        ("top_k", 2**32 - 1),
        ("seed", 0),
        ("seed", 2**63),
        ("seed", 2**64 - 1),
        ("max_tokens", 2**31),
        ("presence_penalty", -3.0),
    ],
)
def test_the_edges_of_each_range_are_accepted(name, value):
    assert getattr(GenerateOptions(**{name: value}), name) == value


def test_every_bad_field_is_named_at_once():
    assert violations(temperature=math.nan, top_p=2.0, max_tokens=0) == [
        "options.max_tokens",
        "options.temperature",
        "options.top_p",
    ]


@pytest.mark.parametrize(
    ("stops", "field"),
    [
        (("",), "options.stop_sequences[0]"),
        (("x", ""), "options.stop_sequences[1]"),
        (("x" * 100_000,), "options.stop_sequences[0]"),
        (tuple(f"stop {i}" for i in range(1000)), "options.stop_sequences"),
    ],
)
def test_stop_sequences_are_bounded_and_never_empty(stops, field):
    assert violations(stop_sequences=stops) == [field]


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_not_finite_is_refused_with_its_position(bias):
    assert violations(logit_bias=((1, 1.0), (5, bias))) == ["options.logit_bias[1].bias"]
