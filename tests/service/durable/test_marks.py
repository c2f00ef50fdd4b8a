"""Positions by sequence number: what a caller who names a number has had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.durable.marks import START, Marks, Position


def test_nothing_was_sent_before_the_first_message() -> None:
    marks = Marks()
    assert (marks.find(0), marks.find(1), marks.last) == (START, None, 0)


def test_a_number_leads_to_the_position_of_its_message() -> None:
    marks = Marks()
    for position in [(0, 0), (1, 2), (1, 2), (4, 9)]:
        marks.add(Position(*position))
    assert [marks.find(sequence) for sequence in range(6)] == [(0, 0), (0, 0), (1, 2), (1, 2), (4, 9), None]


@given(st.lists(st.integers(0, 3), max_size=40))
def test_marks_are_a_table(steps: list[int]) -> None:
    marks, table = Marks(), [START]
    for more in steps:
        table.append(Position(table[-1].tokens + more, table[-1].characters + 2 * more))
        marks.add(table[-1])
    assert [marks.find(sequence) for sequence in range(len(table) + 1)] == [*table, None]
    assert marks.last == len(steps)
