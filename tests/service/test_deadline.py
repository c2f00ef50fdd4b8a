"""A partial result before the deadline: in time however long steps take, and never a stream without a beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from unittest.mock import Mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import delivery_pb2, generation_pb2, result_pb2
from service.deadline import PartialDeadline, margin_seconds
from tests.service.fake_engine import never_end, never_start
from tests.service.harness import Serving, read_all, reason_of, text_request

PARTIAL = {"deadline_policy": delivery_pb2.DEADLINE_POLICY_PARTIAL_RESULT}
SECONDS = st.floats(0, 1e6)


class Recorder:
    """Stands for a generation: remembers when it was aborted."""

    def __init__(self) -> None:
        self.at: float | None = None

    def abort(self, reason: AbortReason) -> None:
        assert reason is AbortReason.DEADLINE
        self.at = asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("given_seconds", "step_seconds", "margin"),
    [
        (2.0, 0.0, 0.2),
        (100.0, 0.0, 1.0),
        (0.2, 0.0, 0.05),
        (2.0, 0.3, 0.65),
        (100.0, 5.0, 10.05),
        (1.0, 5.0, 0.5),
        (0.0, 5.0, 0.0),
    ],
)
def test_the_margin_covers_two_steps_within_half_of_the_time(
    given_seconds: float, step_seconds: float, margin: float
) -> None:
    assert margin_seconds(given_seconds, step_seconds) == pytest.approx(margin)


@given(SECONDS, SECONDS)
def test_the_margin_leaves_half_of_the_time_at_least(given_seconds: float, step_seconds: float) -> None:
    assert 0 <= margin_seconds(given_seconds, step_seconds) <= given_seconds / 2


class Clock:
    """Stands for the loop: time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> Mock:
        self._due.append((self.now + seconds, partial(call, *arguments)))
        return Mock()

    def pass_until(self, latest: float) -> None:
        while self._due and min(self._due, key=itemgetter(0))[0] <= latest:
            self._due.sort(key=itemgetter(0))
            self.now, call = self._due.pop(0)
            call()
        self.now = latest


def test_a_margin_that_grows_while_the_call_runs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, recorder, clock = [0.0], Recorder(), Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    with PartialDeadline(0.8, lambda: steps[0]).ending(recorder):  # type: ignore[arg-type]
        steps[0] = 10.0
        clock.pass_until(0.39)
        assert recorder.at is None
        clock.pass_until(0.8)
    assert recorder.at == pytest.approx(0.4)


async def test_time_that_passed_before_the_engine_accepted_counts() -> None:
    recorder, deadline = Recorder(), PartialDeadline(0.05, lambda: 0.0)
    await asyncio.sleep(0.06)
    with deadline.ending(recorder):  # type: ignore[arg-type]
        assert recorder.at is not None


async def test_without_a_deadline_nothing_is_ended() -> None:
    recorder = Recorder()
    with PartialDeadline(None, lambda: 0.0).ending(recorder):  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert recorder.at is None


async def test_slow_steps_are_allowed_for(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.deadline.MAX_MARGIN_SHARE", 0.95)
    serving.engine.script = never_end("a")
    serving.engine.step = 9.0
    call = serving.generation.Generate(text_request(delivery=PARTIAL), timeout=20.0)
    began = asyncio.get_running_loop().time()
    responses, error = await read_all(call)
    assert error is None
    assert responses[-1].finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE
    assert asyncio.get_running_loop().time() - began < 18, "a second before the end is too late for such steps"


async def refusal(serving: Serving, rpc: str, seconds: float) -> grpc.aio.AioRpcError:
    if rpc == "Generate":
        responses, error = await read_all(serving.generation.Generate(text_request(delivery=PARTIAL), timeout=seconds))
        assert responses == []
        assert error is not None
        return error
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        request = generation_pb2.CompleteRequest(text={"text": "hi"}, delivery=PARTIAL)
        await serving.generation.Complete(request, timeout=seconds)
    return failure.value


@pytest.mark.parametrize("rpc", ["Generate", "Complete"])
async def test_a_generation_that_never_started_has_no_partial_result_and_ends_by_its_status(
    serving: Serving, wide_margin: None, rpc: str
) -> None:
    serving.engine.script = never_start
    error = await refusal(serving, rpc, 20.0)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason_of(error) == "ABORTED"
    assert serving.engine.generations[0].abort_reason is AbortReason.DEADLINE


@pytest.mark.parametrize("rpc", ["Generate", "Complete"])
async def test_slow_tokenizing_does_not_move_the_end_behind_the_deadline(
    serving: Serving, wide_margin: None, rpc: str
) -> None:
    async def tokenize() -> None:
        await asyncio.sleep(2.1)  # longer than until the generation must be told to end

    serving.engine.acceptance = tokenize
    serving.engine.script = never_start
    error = await refusal(serving, rpc, 20.0)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason_of(error) == "ABORTED"
