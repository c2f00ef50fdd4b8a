"""When a job's turn ends, and how long it may wait for a row."""

import pytest

from engine.execution.job import PATIENCE_SECONDS, Job


def job(**fields):
    return Job(row=None, mailbox=None, started=None, **fields)


@pytest.mark.parametrize(
    ("deadline_seconds", "due_at"),
    [(None, 100 + PATIENCE_SECONDS), (600.0, 100 + PATIENCE_SECONDS), (2.5, 102.5), (-1.0, 99.0)],
)
def test_a_turn_ends_at_the_deadline_or_when_patience_does(deadline_seconds, due_at):
    assert job(submitted_at=100.0, deadline_seconds=deadline_seconds).due_at == due_at


def test_a_flow_of_hasty_calls_does_not_starve_one_without_a_deadline():
    waiting = job(submitted_at=100.0)
    hasty = [job(submitted_at=100.0 + later, deadline_seconds=1.0) for later in range(120)]
    assert sum(one.due_at < waiting.due_at for one in hasty) == PATIENCE_SECONDS - 1


def test_the_wait_for_a_row_ends_when_it_is_said_to():
    assert not job(submitted_at=100.0).waits_too_long(1e9)
    bounded = job(submitted_at=100.0, max_queue_seconds=5.0)
    assert [bounded.waits_too_long(now) for now in (100.0, 104.9, 105.0)] == [False, False, True]
