"""Bounds of the operator: each refuses with its number, says when to come back if that may help, and costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxstream.v1 import generation_pb2, model_pb2
from service.access import Access
from service.limits import RequestLimits
from service.offer import Offer
from service.tokens import followed_tokens
from tests.service.fake_engine import FakeEngine, FakeGeneration, never_end
from tests.service.harness import Serving, details_of, read_all, reason_of, serve, text_request, violated_fields
from tests.service.test_metrics import samples
from tests.waiting import until

CODE = grpc.StatusCode
ONE, TWO = "token-of-the-first-team", "token-of-the-second-team"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def tokens_in(tmp_path: Path) -> Access:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[one]\ntoken = "{ONE}"\nmax_streams = 2\nmax_prompt_tokens = 30\n[two]\ntoken = "{TWO}"\n')
    return Access(followed_tokens(path))


async def running_stream(serving: Serving, request_id: str, metadata: Any = ()) -> Any:
    """A call that has started and goes on."""
    call = serving.generation.Generate(text_request(request_id=request_id), metadata=metadata)
    assert (await call.read()).HasField("started")
    return call


async def refusal_of(serving: Serving, request: Any, metadata: Any = ()) -> grpc.aio.AioRpcError:
    responses, error = await read_all(serving.generation.Generate(request, metadata=metadata))
    assert responses == []
    assert error is not None
    return error


def assert_full(error: grpc.aio.AioRpcError, resource: str, limit: int) -> None:
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    details = details_of(error)
    told = dict(details[error_details_pb2.ErrorInfo].metadata)
    assert told == {"resource": resource, "limit": str(limit), "used": str(limit)}
    assert details[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() > 0
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0


async def test_options_over_a_bound_are_refused_with_the_number() -> None:
    limits = RequestLimits(max_stop_sequences=1, max_constraint_bytes=8)
    async with serve(FakeEngine(), Offer(limits=limits)) as running:
        options = {"stop_sequences": ["x", "y"], "json_schema": '{"type": "é"}'}
        error = await refusal_of(running, text_request(options=options))
        assert error.code() is CODE.INVALID_ARGUMENT
        assert violated_fields(error) == ["options.stop_sequences", "options.json_schema"]
        assert "at most 1 are allowed, got 2" in error.details()
        assert "at most 8 bytes are allowed, got 14" in error.details()
        assert running.engine.requests == []
        _, fine = await read_all(
            running.generation.Generate(text_request(options={"stop_sequences": ["x"], "regex": "a" * 8}))
        )
        assert fine is None


async def test_a_message_over_the_bound_is_refused_with_both_numbers_and_never_reaches_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_message_bytes=2000))) as running:
        parsed: list[object] = []
        monkeypatch.setattr("service.rpc._parse", lambda *arguments: parsed.append(arguments))
        error = await refusal_of(running, text_request("x" * 3000))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "2000" in error.details()
        assert "3006" in error.details()
        assert parsed == []


async def test_an_answer_over_the_bound_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.limits.MAX_MESSAGE_BYTES", 1024)
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_message_bytes=1024))) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await running.models.Detokenize(model_pb2.DetokenizeRequest(ids=[50] * 500))
        assert failure.value.code() is CODE.RESOURCE_EXHAUSTED
        assert reason_of(failure.value) == "MESSAGE_TOO_LARGE"
        told = dict(details_of(failure.value)[error_details_pb2.ErrorInfo].metadata)
        assert told["limit_bytes"] == "1024"
        assert int(told["message_bytes"]) > 1024


COMPLETE = "mlx_stream_grpc_server_calls_total{{code={},method=mlxstream.v1.GenerationService/Complete}}"


@pytest.mark.parametrize("asked", [{}, {"include_text": False, "include_token_bytes": True}])
async def test_an_answer_that_grows_over_the_bound_ends_its_generation_and_counts_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, bool]
) -> None:
    async def without_end(generation: FakeGeneration) -> None:
        generation.start()
        while True:
            generation.say("x" * 50)
            await generation.read()

    monkeypatch.setattr("service.limits.MAX_MESSAGE_BYTES", 1024)
    engine = FakeEngine()
    engine.script = without_end
    async with serve(engine, Offer(limits=RequestLimits(max_message_bytes=1024))) as running:
        request = generation_pb2.CompleteRequest(text={"text": "hi"}, delivery=asked)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await running.generation.Complete(request)
        assert failure.value.code() is CODE.RESOURCE_EXHAUSTED
        assert reason_of(failure.value) == "MESSAGE_TOO_LARGE"
        assert "stream it with Generate" in str(failure.value.details())
        assert dict(failure.value.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
        await running.live.wait_idle()
        assert engine.generations[0].emitted < 100
        found = samples(running.telemetry.metrics)
        assert found[COMPLETE.format("RESOURCE_EXHAUSTED")] == 1
        assert COMPLETE.format("OK") not in found


async def test_an_answer_is_measured_as_a_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def many_tokens(generation: FakeGeneration) -> None:
        generation.start()
        generation.say(*["y"] * 150)  # 5 bytes of text and records each, and 2 around each record
        generation.end()

    monkeypatch.setattr("service.limits.MAX_MESSAGE_BYTES", 1024)
    engine = FakeEngine()
    engine.script = many_tokens
    async with serve(engine, Offer(limits=RequestLimits(max_message_bytes=1024))) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await running.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}))
        assert reason_of(failure.value) == "MESSAGE_TOO_LARGE"
        assert running.live.ends.finished == 1
        assert COMPLETE.format("OK") not in samples(running.telemetry.metrics)


async def test_a_small_bound_on_requests_cuts_no_stream_and_no_answer() -> None:
    async def much_text(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("x" * 5000)
        generation.end()

    engine = FakeEngine()
    engine.script = much_text
    async with serve(engine, Offer(limits=RequestLimits(max_message_bytes=1024))) as running:
        responses, error = await read_all(running.generation.Generate(text_request()))
        assert error is None
        assert max(response.ByteSize() for response in responses) > 4096
        assert responses[-1].WhichOneof("event") == "finished"
        answer = await running.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}))
        assert len(answer.text) >= 5000


@pytest.mark.parametrize(("value_bytes", "fits"), [(1000, True), (3000, False)])
async def test_metadata_over_the_bound_is_refused(value_bytes: int, fits: bool) -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_metadata_bytes=2048))) as running:
        metadata = (("x-large", "x" * value_bytes),)
        _, error = await read_all(running.generation.Generate(text_request(), metadata=metadata))
        assert (error is None) == fits
        if error is not None:
            assert error.code() is CODE.RESOURCE_EXHAUSTED
            assert running.engine.requests == []
        assert (await read_all(running.generation.Generate(text_request())))[1] is None


async def test_too_many_calls_of_all_are_refused_until_one_ends() -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_streams=2))) as running:
        running.engine.script = never_end()
        calls = [await running_stream(running, f"r{index}") for index in range(2)]
        assert_full(await refusal_of(running, text_request()), "concurrent calls", 2)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await running.models.GetModel(model_pb2.GetModelRequest())
        assert_full(unary.value, "concurrent calls", 2)
        calls[0].cancel()
        await until(lambda: len(running.engine.live) == 1)
        calls.append(await running_stream(running, "r2"))
        assert len(running.engine.requests) == 3


async def test_probes_and_abort_work_however_many_calls_there_are() -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_streams=1))) as running:
        running.engine.script = never_end("x")
        call = await running_stream(running, "mine")
        await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
        answer = await running.generation.Abort(generation_pb2.AbortRequest(request_id="mine"))
        assert answer.status == generation_pb2.ABORT_STATUS_ABORTED
        _, error = await read_all(call)
        assert error is not None
        assert error.code() is CODE.CANCELLED


async def test_a_caller_with_too_many_calls_keeps_nobody_else_out(tmp_path: Path) -> None:
    async with serve(FakeEngine(), Offer(access=tokens_in(tmp_path))) as running:
        running.engine.script = never_end()
        for index in range(2):
            await running_stream(running, f"r{index}", bearer(ONE))
        error = await refusal_of(running, text_request(), bearer(ONE))
        assert_full(error, "concurrent calls of this caller", 2)
        for index in range(2, 5):
            await running_stream(running, f"r{index}", bearer(TWO))


async def test_the_servers_bound_for_each_caller_holds_for_those_without_one_of_their_own(tmp_path: Path) -> None:
    limits = RequestLimits(max_streams_per_caller=1, max_streams=10)
    async with serve(FakeEngine(), Offer(access=tokens_in(tmp_path), limits=limits)) as running:
        running.engine.script = never_end()
        for index, token in enumerate((ONE, TWO)):
            await running_stream(running, f"r{index}", bearer(token))
            error = await refusal_of(running, text_request(), bearer(token))
            assert_full(error, "concurrent calls of this caller", 1)


async def test_the_smaller_bound_on_a_prompt_goes_to_the_engine(tmp_path: Path) -> None:
    for ours, expected in ((None, [30, None]), (20, [20, 20]), (40, [30, 40])):
        offer = Offer(access=tokens_in(tmp_path), limits=RequestLimits(max_prompt_tokens=ours))
        async with serve(FakeEngine(), offer) as running:
            for token in (ONE, TWO):
                await read_all(running.generation.Generate(text_request(), metadata=bearer(token)))
            assert [request.max_prompt_tokens for request in running.engine.requests] == expected


async def test_a_refused_call_counts_no_longer() -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_streams=1))) as running:
        for _ in range(3):
            error = await refusal_of(running, text_request(options={"temperature": -1.0}))
            assert error.code() is CODE.INVALID_ARGUMENT
        _, fine = await read_all(running.generation.Generate(text_request()))
        assert fine is None
