"""Three causes of cancellation, one path: the engine hears of each, at any moment, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import delivery_pb2, generation_pb2, result_pb2
from tests.service.fake_engine import FakeGeneration, Script, never_end, never_start
from tests.service.harness import Serving, read_all, reason_of, text_request
from tests.waiting import until

COMPLETE = generation_pb2.CompleteRequest(text={"text": "hi"})


async def the_generation(serving: Serving) -> FakeGeneration:
    """The one generation that the engine has accepted, once it has."""
    await asyncio.wait_for(serving.engine.accepted.wait(), 60)
    return serving.engine.generations[0]


async def aborted(serving: Serving) -> AbortReason | None:
    """Why the generation was aborted, once it was."""
    generation = await the_generation(serving)
    await asyncio.wait_for(generation.aborted.wait(), 60)
    await asyncio.wait_for(serving.live.wait_idle(), 60)
    assert serving.engine.live == {}
    return generation.abort_reason


@pytest.mark.parametrize("script", [never_start, never_end(), never_end("a", "b")], ids=["queued", "prefill", "decode"])
async def test_a_cancelled_stream_frees_its_row(serving: Serving, script: Script) -> None:
    serving.engine.script = script
    call = serving.generation.Generate(text_request())
    await the_generation(serving)
    call.cancel()
    assert await aborted(serving) is AbortReason.DISCONNECTED


async def test_a_cancelled_complete_frees_its_row(serving: Serving) -> None:
    serving.engine.script = never_end("a")
    call = serving.generation.Complete(COMPLETE)
    await the_generation(serving)
    call.cancel()
    assert await aborted(serving) is AbortReason.DISCONNECTED


async def test_a_reader_that_vanishes_with_its_connection_frees_its_row(serving: Serving) -> None:
    serving.engine.script = never_end("a")
    channel = grpc.aio.insecure_channel(str(serving.address), options=(("grpc.use_local_subchannel_pool", 1),))
    call = type(serving.generation)(channel).Generate(text_request())
    await call.read()
    await channel.close()
    assert await aborted(serving) is AbortReason.DISCONNECTED


async def test_a_stream_is_freed_while_it_is_blocked_on_a_reader_that_does_not_read(serving: Serving) -> None:
    flooded = asyncio.Event()

    async def flood(generation: FakeGeneration) -> None:
        generation.start()
        while True:
            generation.say("x" * 1000)
            await asyncio.sleep(0)
            if generation.emitted == 3000:
                flooded.set()

    serving.engine.script = flood
    call = serving.generation.Generate(text_request())
    await call.read()
    await flooded.wait()
    call.cancel()
    assert await aborted(serving) is AbortReason.DISCONNECTED


@pytest.mark.parametrize("script", [never_start, never_end("a")], ids=["queued", "decode"])
@pytest.mark.parametrize("rpc", ["Generate", "Complete"])
async def test_a_deadline_frees_the_row_and_is_told_apart(serving: Serving, script: Script, rpc: str) -> None:
    serving.engine.script = script
    if rpc == "Generate":
        _, error = await read_all(serving.generation.Generate(text_request(), timeout=1.0))
    else:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await serving.generation.Complete(COMPLETE, timeout=1.0)
        error = failure.value
    assert error is not None
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await aborted(serving) is AbortReason.DEADLINE


async def test_a_partial_result_comes_before_the_deadline_when_it_was_asked_for(
    serving: Serving, wide_margin: None
) -> None:
    serving.engine.script = never_end("a", "b")
    delivery = {"deadline_policy": delivery_pb2.DEADLINE_POLICY_PARTIAL_RESULT}
    responses, error = await read_all(serving.generation.Generate(text_request(delivery=delivery), timeout=20.0))
    assert error is None
    finished = responses[-1].finished
    assert finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE
    assert finished.stats.generated_tokens == 2
    assert not finished.HasField("error")

    request = generation_pb2.CompleteRequest(text={"text": "hi"}, delivery=delivery)
    answer = await serving.generation.Complete(request, timeout=20.0)
    assert answer.text == "ab"
    assert answer.finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE


async def test_a_call_that_is_cancelled_before_the_engine_accepts_it_starts_nothing(serving: Serving) -> None:
    asked, forever, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def tokenize() -> None:
        asked.set()
        try:
            await forever.wait()
        finally:
            left.set()

    serving.engine.acceptance = tokenize
    call = serving.generation.Generate(text_request())
    await asked.wait()
    call.cancel()
    await asyncio.wait_for(left.wait(), 60)
    forever.set()
    await until(lambda: not serving.live.count)
    await asyncio.sleep(0.05)
    assert serving.engine.generations == []


async def test_a_storm_of_cancellations_leaves_nothing_running_and_no_complaint(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(7)

    async def tokenize() -> None:
        await asyncio.sleep(chance.random() / 1000)

    serving.engine.script = never_end("a")
    serving.engine.acceptance = tokenize

    async def one(number: int) -> None:
        call = serving.generation.Generate(text_request())
        if number % 10 == 0:
            await call.read()
        await asyncio.sleep(chance.random() / 4)
        call.cancel()

    await asyncio.gather(*(one(number) for number in range(300)))
    await asyncio.sleep(0.1)
    await until(lambda: not serving.live.count and not serving.engine.live)
    assert len(serving.engine.generations) >= 30
    assert {generation.abort_reason for generation in serving.engine.generations} == {AbortReason.DISCONNECTED}
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_shutdown_ends_streams_as_unavailable_with_their_account(serving: Serving) -> None:
    serving.engine.script = never_end("a")
    call = serving.generation.Generate(text_request())
    await the_generation(serving)
    await serving.engine.stop()
    responses, error = await read_all(call)
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "UNAVAILABLE"
    assert responses[-1].finished.stats.generated_tokens == 1
    assert responses[-1].finished.error.retryable


async def test_a_unary_call_that_is_accepted_says_so_at_once_and_so_is_never_repeated(serving: Serving) -> None:
    """gRPC's clients repeat a call that breaks before its headers have come: one that runs would run twice."""
    serving.engine.script = never_end("a")
    # Called as a stream, since a unary call of grpc.aio does not show headers before the answer.
    call = serving.channel.unary_stream(
        "/mlxstream.v1.GenerationService/Complete",
        request_serializer=generation_pb2.CompleteRequest.SerializeToString,
        response_deserializer=generation_pb2.CompleteResponse.FromString,
    )(COMPLETE)
    await asyncio.wait_for(call.initial_metadata(), 60)
    assert not call.done()
    assert len(serving.engine.generations) == 1
    call.cancel()
