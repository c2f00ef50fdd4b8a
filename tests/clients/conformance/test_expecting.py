"""What the runner judges: expectations, and what two clients must tell alike."""

from __future__ import annotations

from typing import Any

import pytest

from clients.conformance.runner.expecting import comparable, differences


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 1}, {"a": 1.0, "b": 2}),
        ({"a": {"b": None}}, {"a": {}}),
        ({"a": {"$at_least": 3}}, {"a": 3}),
        ({"a": {"$at_most": 3}}, {"a": 2.5}),
        ({"a": {"$one_of": ["x", "y"]}}, {"a": "y"}),
        ({"a": {"$begins": "te"}}, {"a": "text"}),
        ({"a": {"$begins_of": "text"}}, {"a": "te"}),
        ({"a": {"$has": "ex"}}, {"a": "text"}),
        ({"a": {"$any": True}}, {"a": ""}),
        ({"a": {}}, {"a": {}}),
    ],
)
def test_what_is_as_expected_has_no_differences(expected: Any, found: Any) -> None:
    assert differences(expected, found) == []


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [
        ({"a": 1}, {"a": 2}, "a: 2"),
        ({"a": 1}, {}, "a: None"),
        ({"a": {"b": 1}}, {"a": None}, "a: None is no object"),
        ({"a": {"b": True}}, {"a": {"b": 1.5}}, "a.b"),
        ({"a": {"$at_least": 3}}, {"a": None}, "a: None"),
        ({"a": {"$begins_of": "text"}}, {"a": ""}, "a: ''"),
        ({"a": {"$has": "xe"}}, {"a": "text"}, "a: 'text' is not has"),
        ({"a": [1, 2]}, {"a": [1]}, r"a: \[1\]"),
    ],
)
def test_each_difference_is_told_with_its_place(expected: Any, found: Any, place: str) -> None:
    (told,) = differences(expected, found)
    assert told.startswith(place.replace("\\", ""))


def test_an_operator_that_does_not_exist_is_a_fault_of_the_case() -> None:
    with pytest.raises(ValueError, match="no such operator"):
        differences({"a": {"$about": 1}}, {"a": 1})


def test_times_and_drawn_seeds_are_not_compared_and_text_is() -> None:
    one = {"outcome": "finished", "text": "a", "seconds": 1, "started": {"seed": "1", "model": "m"}}
    assert comparable(one) == comparable({**one, "seconds": 2, "started": {"seed": "2", "model": "m"}})
    assert comparable(one) != comparable({**one, "text": "b"})


def test_of_a_generation_that_was_ended_only_the_manner_is_compared() -> None:
    one = {"outcome": "failed", "text": "abc", "error": {"kind": "cancelled", "message": "x"}}
    assert comparable(one) == comparable({**one, "text": "ab", "error": {"kind": "cancelled", "message": "y"}})
    assert comparable(one) != comparable({**one, "error": {"kind": "server"}})
