"""The worker does its tasks in order and counts what they hold; a fault costs the task that has it."""

import threading

import pytest

from engine.state.disk_worker import DiskWorker


@pytest.fixture
def opened():
    workers = []

    def open_worker(idle=lambda: None, *, idle_seconds=None, failed=lambda error: None):
        workers.append(DiskWorker("a worker", idle=idle, idle_seconds=idle_seconds, failed=failed))
        return workers[-1]

    yield open_worker
    for worker in workers:
        worker.close(10)


def test_its_own_work_comes_first_and_tasks_follow_in_order(opened):
    done = []
    worker = opened(lambda: done.append("own"))
    for number in range(20):
        worker.submit(lambda number=number: done.append(number))
    assert worker.wait_idle(60)
    assert done == ["own", *range(20)]


def test_its_own_work_comes_again_when_there_is_no_task_for_a_while(opened):
    times, twice = [], threading.Event()

    def own():
        times.append(1)
        if len(times) == 3:
            twice.set()

    opened(own, idle_seconds=0.001)
    assert twice.wait(60)


def test_what_tasks_hold_counts_until_they_are_done(opened):
    worker, gate = opened(), threading.Event()
    worker.submit(lambda: gate.wait(60), nbytes=5)
    worker.submit(lambda: None, nbytes=7)
    assert worker.held_bytes == 12
    gate.set()
    assert worker.wait_idle(60)
    assert worker.held_bytes == 0


def test_a_fault_costs_its_own_task(opened, caplog):
    refused, done = [], []
    worker = opened(failed=refused.append)

    def refuse():
        raise OSError(28, "No space left on device")

    worker.submit(refuse)
    worker.submit(lambda: 1 / 0)
    worker.submit(lambda: done.append(True))
    assert worker.wait_idle(60)
    assert [error.errno for error in refused] == [28]
    assert "work on the disk has failed" in caplog.text
    assert done == [True]


def test_what_is_queued_at_the_close_is_done_and_what_comes_later_is_done_at_once(opened):
    worker, gate, done = opened(), threading.Event(), []
    worker.submit(lambda: gate.wait(60))
    worker.submit(lambda: done.append("queued"))
    gate.set()
    worker.close(10)
    assert done == ["queued"]
    worker.submit(lambda: done.append(threading.current_thread().name))
    assert done == ["queued", threading.current_thread().name]
