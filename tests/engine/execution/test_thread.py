"""The engine thread with a scripted stepper: isolation, aborts, queue bounds, and an end for everybody."""

import asyncio
from dataclasses import replace

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    EngineFailedError,
    GenerationFailedError,
    OverloadedError,
    UnavailableError,
)
from engine.contracts.events import GenerationStarted, PrefillProgress, TokensGenerated
from engine.contracts.results import FinishReason
from engine.generation.row import RowFault
from tests.engine.execution.thread_harness import FakeStepper, Harness, end_of, events_of
from tests.waiting import until


@pytest.fixture
async def harness():
    harness = Harness()
    harness.thread.start()
    await until(lambda: harness.thread.load().row_limit)  # the bounds of the queue hold from here on
    yield harness
    await harness.stop()
    # Whatever the test was about, each generation's accounts were finished, once.
    assert harness.stepper.ended_generations == harness.submitted


async def test_a_stream_starts_then_carries_tokens_in_order_then_ends_once(harness):
    job, _ = harness.submit(prompt=3, length=4)
    events = await events_of(job)
    assert isinstance(events[0], GenerationStarted)
    middle = [event for event in events[1:-1] if isinstance(event, TokensGenerated)]
    assert all(isinstance(event, TokensGenerated | PrefillProgress) for event in events[1:-1])
    assert [token.index for event in middle for token in event.tokens] == [0, 1, 2, 3]
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert job.row.closed == 1


async def test_a_fault_in_one_rows_text_ends_that_row_alone(harness):
    good, _ = harness.submit(length=5)
    bad, _ = harness.submit(faulty=True)
    assert isinstance((await end_of(bad)).error, GenerationFailedError)
    assert (await end_of(good)).finish_reason is FinishReason.LENGTH
    assert (good.row.closed, bad.row.closed) == (1, 1)


async def test_a_failing_shared_step_ends_the_guilty_row_alone(harness):
    harness.stepper.gated = True
    first, _ = harness.submit(length=6)
    bad, _ = harness.submit(length=6)
    harness.stepper.gate.release(2)
    await until(lambda: harness.stepper.steps == 2)
    harness.stepper.guilty = bad.row
    harness.stepper.gate.release(100)
    assert isinstance((await end_of(bad)).error, GenerationFailedError)
    good = await end_of(first)
    assert (good.finish_reason, good.stats.generated_tokens) == (FinishReason.LENGTH, 6)
    assert first.row.restarts >= 1
    assert harness.thread._batch._suspects == {}
    after, _ = harness.submit()
    assert (await end_of(after)).finish_reason is FinishReason.LENGTH


async def test_a_passing_fault_of_a_shared_step_ends_nobody(harness):
    harness.stepper.gated = True
    jobs = [harness.submit(length=60)[0] for _ in range(2)]
    for tokens in (2, 5, 8, 11):
        while len(jobs[0].row.tokens) < tokens or harness.thread._batch._suspects:
            harness.stepper.gate.release(1)
            await asyncio.sleep(0.002)
        harness.stepper.faults = 1
    harness.stepper.gate.release(1000)
    assert [(await end_of(job)).finish_reason for job in jobs] == [FinishReason.LENGTH] * 2


async def test_a_row_that_fails_alone_twice_ends_and_the_engine_goes_on(harness):
    harness.stepper.faults = 2
    job, _ = harness.submit()
    error = (await end_of(job)).error
    assert isinstance(error, GenerationFailedError)
    assert "hiccuped" not in str(error)
    again, _ = harness.submit()
    assert (await end_of(again)).finish_reason is FinishReason.LENGTH


async def test_a_row_that_fails_late_is_found_although_it_passed_before(harness):
    """The guilty unit is the sixth: proving that the first five work clears nobody."""
    harness.stepper.gated = True
    good, _ = harness.submit(length=20)
    bad, _ = harness.submit(prompt=3, length=20)
    harness.stepper.guilty, harness.stepper.guilty_at = bad.row, 5
    harness.stepper.gate.release(500)
    assert isinstance((await end_of(bad)).error, GenerationFailedError)
    assert len(bad.row.tokens) == 3
    end = await end_of(good)
    assert (end.finish_reason, end.stats.generated_tokens) == (FinishReason.LENGTH, 20)


async def test_rows_that_fail_only_together_lose_the_newest_and_the_rest_goes_on(harness):
    harness.stepper.most_together, harness.stepper.gated = 1, True
    jobs = [harness.submit(length=6)[0] for _ in range(2)]
    harness.stepper.gate.release(1000)
    ends = [await end_of(job) for job in jobs]
    assert sorted(end.finish_reason.value for end in ends) == ["error", "length"]


async def test_requests_that_fail_alone_never_end_the_engine(harness):
    for _ in range(6):
        harness.stepper.faults = 2
        job, _ = harness.submit()
        assert isinstance((await end_of(job)).error, GenerationFailedError)
    job, _ = harness.submit()
    assert (await end_of(job)).finish_reason is FinishReason.LENGTH
    assert harness.ends == []


async def test_a_device_that_no_longer_works_ends_the_engine_and_everybody_waiting():
    harness = Harness()
    harness.stepper.gated = True
    harness.stepper.faults = 10**6
    harness.stepper.dead = True
    harness.thread.start()
    await until(lambda: harness.thread.load().row_limit)
    jobs = [harness.submit()[0] for _ in range(6)]
    harness.stepper.gate.release(1000)
    ends = [await end_of(job) for job in jobs]
    await asyncio.to_thread(harness.thread.join)
    assert all(isinstance(end.error, EngineFailedError | GenerationFailedError) for end in ends)
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], EngineFailedError)
    assert harness.stepper.closed
    with pytest.raises(UnavailableError):
        harness.submit()


@pytest.mark.parametrize("count", [1, 3])
async def test_one_incident_that_hits_both_steps_in_flight_ends_nobody(harness, count):
    harness.stepper.gated = True
    jobs = [harness.submit(length=30)[0] for _ in range(count)]
    harness.stepper.gate.release(6)
    await until(lambda: harness.stepper.steps == 6)
    harness.stepper.dispatch_faults = 1
    harness.stepper.gate.release(1)
    await until(lambda: not harness.stepper.dispatch_faults)  # now the step before it is waited for
    harness.stepper.faults = 1
    harness.stepper.gate.release(1000)
    assert [(await end_of(job)).finish_reason for job in jobs] == [FinishReason.LENGTH] * count


async def test_an_old_joint_failure_is_not_held_against_strangers(harness):
    harness.stepper.gated = True
    pair = [harness.submit(length=1)[0] for _ in range(2)]
    harness.stepper.faults = 1
    harness.stepper.gate.release(1000)
    assert [(await end_of(job)).finish_reason for job in pair] == [FinishReason.LENGTH] * 2
    for _ in range(3):
        await end_of(harness.submit(length=2)[0])
    strangers = [harness.submit(length=12)[0] for _ in range(2)]
    harness.stepper.faults = 1
    assert [(await end_of(job)).finish_reason for job in strangers] == [FinishReason.LENGTH] * 2


async def test_a_row_without_a_token_ends_alone_with_the_reason_in_the_log(harness, caplog):
    harness.stepper.fault = RowFault("its logits are not finite")
    job, _ = harness.submit()
    assert isinstance((await end_of(job)).error, GenerationFailedError)
    assert "its logits are not finite" in caplog.text
    harness.stepper.fault = None
    job, _ = harness.submit()
    assert (await end_of(job)).finish_reason is FinishReason.LENGTH


async def test_an_abort_is_seen_between_steps_and_frees_the_row(harness):
    harness.stepper.gated = True
    job, controller = harness.submit(length=10**6)
    harness.stepper.gate.release(5)
    await until(lambda: harness.stepper.steps == 5)
    controller.abort(AbortReason.REQUESTED)
    harness.stepper.gate.release(1)
    end = await end_of(job)
    assert end.finish_reason is FinishReason.CANCELLED
    assert end.stats.generated_tokens <= 6
    assert job.row.closed == 1


async def test_an_abort_reaches_a_row_that_is_still_queued(harness):
    harness.stepper.gated = True
    running = [harness.submit(length=10**6) for _ in range(2)]
    queued, controller = harness.submit()
    controller.abort(AbortReason.DISCONNECTED)
    harness.stepper.gate.release(3)
    assert (await end_of(queued)).error.abort_reason is AbortReason.DISCONNECTED
    assert queued.row.closed == 1
    for _, other in running:
        other.abort(AbortReason.REQUESTED)


async def test_an_abort_before_admission_never_runs_a_step_for_the_row(harness):
    harness.stepper.gated = True
    job, controller = harness.submit()
    controller.abort(AbortReason.REQUESTED)
    harness.stepper.gate.release(1)
    assert (await end_of(job)).stats.generated_tokens in (0, 1)


async def test_the_queue_is_bounded_and_refuses_with_numbers(harness):
    harness.stepper.gated = True
    jobs = [harness.submit(length=10**6) for _ in range(6)]
    with pytest.raises(OverloadedError) as caught:
        harness.submit()
    assert (caught.value.limit, caught.value.used) == (4, 4)
    assert caught.value.retry_after_seconds > 0
    for _, controller in jobs:
        controller.abort(AbortReason.REQUESTED)


async def test_where_memory_runs_out_before_rows_no_more_wait_than_the_queue_may_hold():
    harness = Harness(max_queue=4)
    harness.stepper.limits = replace(FakeStepper.limits, max_rows=8, state_bytes=100)
    harness.stepper.gated = True
    harness.thread.start()
    await until(lambda: harness.thread.load().row_limit)
    jobs = [harness.submit(predicted_bytes=50, length=10**6) for _ in range(6)]
    with pytest.raises(OverloadedError) as caught:
        harness.submit(predicted_bytes=50)
    assert (caught.value.limit, caught.value.used) == (4, 4)
    await until(lambda: harness.thread.load().running == 2)
    assert harness.thread.load().queued == 4
    for _, controller in jobs:
        controller.abort(AbortReason.REQUESTED)
    await harness.stop()


async def test_a_burst_within_one_step_that_rows_are_free_for_is_not_refused():
    harness = Harness(max_queue=1)
    harness.stepper.limits = replace(FakeStepper.limits, max_rows=8)
    harness.stepper.gated = True
    harness.thread.start()
    jobs = [harness.submit(length=10**6)]
    await until(lambda: harness.stepper.at_gate)
    jobs += [harness.submit(length=10**6) for _ in range(8)]
    with pytest.raises(OverloadedError):
        harness.submit()
    for _, controller in jobs:
        controller.abort(AbortReason.REQUESTED)
    await harness.stop()


async def test_rows_beyond_the_limit_wait_their_turn(harness):
    jobs = [harness.submit(length=3)[0] for _ in range(5)]
    assert [(await end_of(job)).finish_reason for job in jobs] == [FinishReason.LENGTH] * 5


async def test_an_idle_thread_rests_and_reports_no_stall(harness):
    job, _ = harness.submit()
    await end_of(job)
    await until(lambda: harness.stepper.rests >= 1 and harness.thread.stalled_seconds() == 0)


async def test_a_recent_maximum_of_step_times_is_told():
    now = [100.0]
    harness = Harness(clock=lambda: now[0])
    harness.stepper.gated = True
    harness.thread.start()
    job, _ = harness.submit(length=2)
    await until(lambda: harness.stepper.at_gate)
    now[0] += 2.0
    harness.stepper.gate.release(10)
    await end_of(job)
    await harness.stop()
    assert 1.5 < harness.thread.step_seconds <= 2.0


async def test_a_step_that_hangs_shows_as_a_stall(harness):
    harness.stepper.gated = True
    harness.submit()
    await until(lambda: harness.thread.stalled_seconds() > 0.05)


async def test_stop_ends_an_idle_thread_and_releases_the_model():
    harness = Harness()
    harness.thread.start()
    await harness.stop()
    await until(lambda: harness.ends)
    assert harness.ends == [None]
    assert harness.stepper.closed


async def test_a_failed_load_is_reported_and_ends_what_waited():
    def load():
        raise UnavailableError("stopped")

    harness = Harness(load=load)
    harness.thread.start()
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], UnavailableError)


async def test_a_reader_that_comes_late_finds_everything_merged_in_order(harness):
    job, _ = harness.submit(prompt=1, length=50)
    await end_of(job)
    events = await events_of(job)
    assert len(events) == 3
    assert [token.index for token in events[1].tokens] == list(range(50))
    assert events[1].text == "7" * 50
