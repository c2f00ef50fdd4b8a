"""The prefill step planner, against the rule as the reference states it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generation.prefill import next_prefill_step


def steps_of(length: int, chunk: int, *, start: int = 0, **rules: bool) -> list[tuple[int, int, bool]]:
    steps, position = [], start
    while position < length:
        step = next_prefill_step(length=length, position=position, chunk_size=chunk, **rules)
        assert not step.joined or (step.final and step.tokens > 2)
        steps.append((step.start, step.end, step.final))
        position = step.end
    return steps


def test_tail_split_runs_the_last_token_alone():
    assert steps_of(10, 4, tail_split=True) == [(0, 4, False), (4, 8, False), (8, 9, False), (9, 10, True)]


def test_without_tail_split_the_rest_is_the_final_step():
    assert steps_of(10, 4, tail_split=False) == [(0, 4, False), (4, 8, False), (8, 10, True)]


def test_a_prompt_of_one_token_is_one_final_step():
    assert steps_of(1, 64, tail_split=True) == [(0, 1, True)]


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (10, [(0, 4, False), (4, 8, False), (8, 9, False), (9, 10, True)]),
        (11, [(0, 4, False), (4, 8, False), (8, 11, True)]),
        (12, [(0, 4, False), (4, 8, False), (8, 12, True)]),
        (13, [(0, 4, False), (4, 8, False), (8, 12, False), (12, 13, True)]),
    ],
)
def test_a_tail_joins_the_chunk_before_it_where_both_fit_into_one_chunk(length, steps):
    assert steps_of(length, 4, tail_split=True, joins_tail=True) == steps


@given(st.integers(1, 300), st.integers(1, 100), st.booleans(), st.booleans(), st.data())
def test_steps_cover_the_prompt_once_and_end_with_one_final(length, chunk, tail_split, joins_tail, data):
    start = data.draw(st.integers(0, length - 1))
    steps = steps_of(length, chunk, tail_split=tail_split, joins_tail=joins_tail, start=start)
    assert steps[0][0] == start
    assert steps[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(steps))
    assert all(0 < end - begin <= chunk for begin, end, _ in steps)
    assert [final for *_, final in steps] == [False] * (len(steps) - 1) + [True]
    if tail_split and not joins_tail:
        assert steps[-1][1] - steps[-1][0] == 1


@pytest.mark.parametrize(("length", "position", "chunk"), [(0, 0, 1), (4, 4, 1), (4, -1, 1), (4, 0, 0)])
def test_positions_outside_the_prompt_are_refused(length, position, chunk):
    with pytest.raises(ValueError, match="no prefill step"):
        next_prefill_step(length=length, position=position, chunk_size=chunk, tail_split=True)
