"""Rows that are computed one at a time take turns in a circle, whatever they do. No mlx, no clock, no thread."""

from collections import Counter

import pytest

from tests.engine.execution.test_scheduler import FakeJob, run_step, scheduler, submit


def circle(rows=1, **changes):
    return scheduler(rows_per_step=rows, **changes)


def served(policy, steps):
    """Who took part in each step."""
    return [[job for job, _ in run_step(policy, number)] for number in range(steps)]


def test_a_step_holds_one_row_and_the_rows_follow_each_other():
    policy = circle()
    first, second, third = submit(policy, *(FakeJob(1, 100) for _ in range(3)))
    assert served(policy, 7) == [[first], [second], [third]] * 2 + [[first]]


def test_a_step_may_hold_several_rows():
    policy = circle(2)
    first, second, third = submit(policy, *(FakeJob(1, 100) for _ in range(3)))
    assert served(policy, 3) == [[first, second], [third, first], [second, third]]


def test_a_prompt_that_is_read_has_no_more_turns_than_one_that_decodes():
    policy = circle()
    decoding, reading = submit(policy, FakeJob(1, 100), FakeJob(1000, 1, exact_chunk=64))
    turns = Counter(id(job) for step in served(policy, 20) for job in step)
    assert turns[id(decoding)] == turns[id(reading)] == 10


def test_a_new_row_comes_after_those_that_were_there():
    policy = circle()
    first, second = submit(policy, FakeJob(1, 100), FakeJob(1, 100))
    run_step(policy)
    (late,) = submit(policy, FakeJob(1, 100))
    assert served(policy, 3) == [[second], [late], [first]] or served(policy, 3) == [[second], [first], [late]]


def test_a_row_that_leaves_takes_no_turn_with_it():
    policy = circle()
    first, second, third = submit(policy, *(FakeJob(1, 100) for _ in range(3)))
    run_step(policy)
    policy.remove(second)
    assert served(policy, 4) == [[third], [first], [third], [first]]


def test_a_row_that_may_not_step_is_passed_over_and_comes_first_afterwards():
    policy = circle()
    first, second = submit(policy, FakeJob(1, 100), FakeJob(1, 100))
    policy.admit()
    assert [job for job, _ in policy.plan(lambda job: job is not first)] == [second]
    assert [job for job, _ in policy.plan(lambda job: False)] == []
    assert [job for job, _ in policy.plan()] == [first]


@pytest.mark.parametrize("rows", [1, 2])
def test_admission_counts_the_workspace_of_as_many_rows_as_a_step_holds(rows):
    asked = []

    def workspace(*, step_tokens, context_tokens):
        asked.append((step_tokens, context_tokens))
        return 0

    policy = circle(rows, workspace_bytes=workspace)
    submit(policy, *(FakeJob(20, 1, unit_tokens=20, context_tokens=50) for _ in range(3)))
    policy.admit()
    assert asked[-1] == (20 * rows, 50)
