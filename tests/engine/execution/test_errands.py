"""Errands of the engine thread: when they are done, what becomes of their faults, and that rows go on meanwhile."""

import asyncio
import gc
import threading
import traceback
import weakref

import pytest

from engine.contracts.cancellation import AbortController
from engine.contracts.errors import EngineFailedError, UnavailableError
from engine.contracts.results import FinishReason
from engine.execution.delivery import Mailbox
from engine.execution.errands import Errand
from engine.execution.job import Job
from tests.engine.execution.thread_harness import STARTED, FakeRow, FakeStepper, Harness, end_of
from tests.waiting import until


@pytest.fixture
async def harness():
    harness = Harness()
    harness.thread.start()
    yield harness
    await harness.stop()


async def test_an_errand_is_done_between_rounds_and_its_result_comes_back(harness):
    names = await asyncio.wrap_future(harness.thread.call(lambda: threading.current_thread().name))
    assert names == "mlx-engine"
    job, _ = harness.submit(length=50)
    assert await asyncio.wrap_future(harness.thread.call(lambda: 7)) == 7
    assert (await end_of(job)).finish_reason is FinishReason.LENGTH


async def test_an_errand_that_is_not_due_waits_for_the_rows_that_hold_it_up(harness):
    harness.stepper.gated = True
    job, _ = harness.submit(length=3)
    order = []
    waiting = harness.thread.call(lambda: order.append("held up"), lambda: job.row.closed)
    at_once = harness.thread.call(lambda: order.append("at once"))
    harness.stepper.gate.release(100)
    await end_of(job)
    await asyncio.wrap_future(waiting)
    assert at_once.done()
    assert order == ["at once", "held up"]


async def test_a_fault_in_an_errand_is_its_callers_and_rows_go_on(harness):
    def broken():
        raise ValueError("a fault of the errand")

    job, _ = harness.submit(length=50)
    with pytest.raises(ValueError, match="a fault of the errand"):
        await asyncio.wrap_future(harness.thread.call(broken))
    assert (await end_of(job)).finish_reason is FinishReason.LENGTH


async def test_an_errand_that_finds_the_device_dead_ends_the_engine(harness):
    def dead():
        raise EngineFailedError("1234")

    with pytest.raises(EngineFailedError):
        await asyncio.wrap_future(harness.thread.call(dead))
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], EngineFailedError)
    with pytest.raises(UnavailableError):
        await asyncio.wrap_future(harness.thread.call(lambda: None))


async def test_rows_have_their_turn_inside_a_long_errand(harness):
    job, _ = harness.submit(length=20)

    def long():
        while not job.row.closed:
            harness.thread.breathe()
        return len(job.row.tokens)

    assert await asyncio.wrap_future(harness.thread.call(long)) == 20


async def test_an_errand_that_nobody_wants_any_more_is_not_done(harness):
    harness.stepper.gated = True
    job, _ = harness.submit(length=3)
    done = []
    errand = harness.thread.call(lambda: done.append(1), lambda: job.row.closed)
    assert errand.cancel()
    harness.stepper.gate.release(100)
    await end_of(job)
    await asyncio.wrap_future(harness.thread.call(lambda: None))
    assert done == []


def test_what_a_failed_errand_held_goes_at_once_and_its_failure_tells_where_it_was():
    class Weights:
        pass

    held = []

    def work():
        weights = Weights()
        held.append(weakref.ref(weights))
        raise UnavailableError("stopped", "nobody wants it")

    errand = Errand(work=work)
    gc.disable()
    try:
        errand.run()
        assert held[0]() is None
    finally:
        gc.enable()
    failure = errand.future.exception()
    assert isinstance(failure, UnavailableError)
    assert [frame.name for frame in traceback.extract_tb(failure.__traceback__)] == ["run", "work"]


async def test_errands_left_at_the_end_are_refused():
    stopping = threading.Event()
    harness = Harness(load=lambda: FakeStepper() if stopping.wait(60) else None)
    harness.thread.start()
    errand = harness.thread.call(lambda: None)
    harness.thread.stop()
    stopping.set()
    await harness.stop()
    with pytest.raises(UnavailableError):
        await asyncio.wrap_future(errand)


async def test_a_second_model_takes_jobs_of_its_own_and_the_first_goes_when_its_last_row_has_ended(harness):
    second = FakeStepper()
    number = await asyncio.wrap_future(harness.thread.call(lambda: harness.thread.add(second)))
    old, _ = harness.submit(length=500)
    removal = harness.thread.call(lambda: harness.thread.remove(0), lambda: not len(harness.thread.batch(0)))
    controller, mailbox = AbortController(), Mailbox(on_finished=lambda: None)
    new = Job(row=FakeRow(controller.signal, length=3), mailbox=mailbox, started=STARTED)
    harness.thread.submit(new, to=number)
    assert (await end_of(new)).finish_reason is FinishReason.LENGTH
    assert second.ended_generations == 1
    assert (await end_of(old)).finish_reason is FinishReason.LENGTH
    await asyncio.wrap_future(removal)
    assert harness.stepper.closed
    assert not second.closed
