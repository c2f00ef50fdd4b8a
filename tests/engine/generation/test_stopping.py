"""Stop sequences: what is sent, what waits, and where the text ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.errors import InvalidRequestError
from engine.generation.stopping import StopRule

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
DELTAS = st.lists(st.text("abc", max_size=4), max_size=12)


def fed(stops: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    """What each delta released, the flush last, and the stop that was met."""
    rule = StopRule(stops)
    released = [rule.push(delta) for delta in deltas]
    return [*released, rule.flush()], rule.matched_stop


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first end wins; of several stops with that end, the longest."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def naively_held(stops: list[str], text: str) -> int:
    """Length of the longest end of `text` that begins a stop."""
    beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


@given(STOPS, DELTAS)
def test_the_outcome_depends_on_the_text_and_not_on_its_cuts(stops: list[str], deltas: list[str]) -> None:
    released, met = fed(stops, deltas)
    assert ("".join(released), met) == naive(stops, "".join(deltas))


@given(STOPS, DELTAS)
def test_exactly_the_end_that_may_begin_a_stop_is_held(stops: list[str], deltas: list[str]) -> None:
    rule, text, sent = StopRule(stops), "", ""
    for delta in deltas:
        text, sent = text + delta, sent + rule.push(delta)
        if rule.matched_stop is None:
            assert len(text) - len(sent) == naively_held(stops, text)


@pytest.mark.parametrize(
    ("stops", "before", "met"),
    [
        (["green blue"], "red ", "green blue"),
        (["en bl"], "red gre", "en bl"),
        (["blue"], "red green ", "blue"),
        (["ue bla", "blue"], "red green ", "blue"),
        (["ue bla", "blue black"], "red green bl", "ue bla"),
        (["lue", "blue"], "red green ", "blue"),
        (["blue", "blue"], "red green ", "blue"),
        (["red"], "", "red"),
        (["nowhere"], "red green blue black", None),
        ([], "red green blue black", None),
    ],
)
@pytest.mark.parametrize(
    "deltas", [["red", " green", " blue", " black"], list("red green blue black"), ["red green blue black"]]
)
def test_text_ends_right_before_the_earliest_match(
    stops: list[str], before: str, met: str | None, deltas: list[str]
) -> None:
    released, matched = fed(stops, deltas)
    assert ("".join(released), matched) == (before, met)


def test_a_stop_over_many_deltas_leaks_nothing() -> None:
    assert fed(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", "", ""], "DEFGHIJ")


def test_text_that_only_began_a_stop_is_released_when_that_is_certain() -> None:
    assert fed(["DEFX"], ["DEF", "G", "HI", "J"]) == (["", "DEFG", "HI", "J", ""], None)


def test_text_that_still_begins_a_stop_is_released_at_the_end() -> None:
    assert fed(["HIJK"], ["DEF", "G", "HI", "J"]) == (["DEF", "G", "", "", "HIJ"], None)


@pytest.mark.parametrize(("stop", "before"), [("DEF", ""), ("E", "D")])
def test_a_stop_may_lie_within_the_first_delta(stop: str, before: str) -> None:
    assert fed([stop], ["DEF", "G"]) == ([before, "", ""], stop)


def test_only_the_ambiguous_end_waits() -> None:
    assert fed(["</s>" * 1000], ["all of this </", "s></s", "x"]) == (["all of this ", "", "</s></sx", ""], None)


def test_of_two_stops_the_one_that_is_complete_first_wins() -> None:
    assert fed(["abcde", "cd"], ["abcde"]) == (["ab", ""], "cd")


def test_nothing_is_released_after_a_match() -> None:
    rule = StopRule(["x"])
    assert [rule.push("axb"), rule.push("c"), rule.flush()] == ["a", "", ""]


@pytest.mark.parametrize("stop", [" ", "\n", "\x00", "👩🏽\u200d🚀"])
def test_any_single_text_may_be_a_stop(stop: str) -> None:
    assert fed([stop], [f"a{stop}b"]) == (["a", ""], stop)


@pytest.mark.parametrize(("stops", "position"), [([""], 0), (["x", ""], 1)])
def test_an_empty_stop_is_refused_by_position(stops: list[str], position: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"options.stop_sequences\[{position}\]: must not be empty"):
        StopRule(stops)


def test_as_many_stops_as_allowed_of_the_greatest_length_are_watched() -> None:
    stops = ["a" * (4096 - at) + "b" for at in range(64)]
    released, met = fed(stops, ["a" * 1000] * 4 + ["a" * 96 + "bc"])
    assert ("".join(released), met) == ("", "a" * 4096 + "b")
    released, met = fed(stops, ["a" * 1000] * 9)
    assert ("".join(released), met) == ("a" * 9000, None)
    assert released[:4] == ["", "", "", ""]
    assert len(released[-1]) == 4096
