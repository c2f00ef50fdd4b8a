"""Abort by RPC, and the life of request ids."""

from __future__ import annotations

import grpc
import pytest

from mlxstream.v1 import error_pb2, generation_pb2, result_pb2
from tests.service.fake_engine import never_end, never_start
from tests.service.harness import Serving, read_all, reason_of, text_request, violated_fields


async def abort(serving: Serving, **target: str) -> generation_pb2.AbortResponse:
    response: generation_pb2.AbortResponse = await serving.generation.Abort(generation_pb2.AbortRequest(**target))
    return response


@pytest.mark.parametrize("by", ["request_id", "generation_id"])
async def test_an_aborted_stream_ends_with_its_account_and_cancelled(serving: Serving, by: str) -> None:
    serving.engine.script = never_end("a", "b")
    call = serving.generation.Generate(text_request(request_id="mine"))
    started = (await call.read()).started
    answer = await abort(serving, **{by: getattr(started, by)})
    assert answer.status == generation_pb2.ABORT_STATUS_ABORTED
    assert answer.stats.generated_tokens == 2

    responses, error = await read_all(call)
    assert error is not None
    assert error.code() is grpc.StatusCode.CANCELLED
    assert reason_of(error) == "ABORTED"
    finished = responses[-1].finished
    assert finished.finish_reason == result_pb2.FINISH_REASON_CANCELLED
    assert finished.stats.generated_tokens == 2
    assert finished.error.reason == error_pb2.ERROR_REASON_ABORTED


async def test_a_queued_generation_can_be_aborted_and_ends_by_its_status_alone(serving: Serving) -> None:
    serving.engine.script = never_start
    call = serving.generation.Generate(text_request(request_id="mine"))
    while (await abort(serving, request_id="mine")).status != generation_pb2.ABORT_STATUS_ABORTED:
        pass
    responses, error = await read_all(call)
    assert responses == []
    assert error is not None
    assert error.code() is grpc.StatusCode.CANCELLED


async def test_aborting_what_is_unknown_or_finished_is_no_error(serving: Serving) -> None:
    await read_all(serving.generation.Generate(text_request(request_id="mine")))
    for target in ({"request_id": "mine"}, {"request_id": "other"}, {"generation_id": "none"}, {"request_id": ""}):
        answer = await abort(serving, **target)
        assert answer.status == generation_pb2.ABORT_STATUS_NOT_RUNNING
        assert not answer.HasField("stats")


async def test_an_abort_needs_a_target(serving: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await abort(serving)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(failure.value) == ["target"]


async def test_a_live_request_id_is_refused_and_a_finished_one_is_free_again(serving: Serving) -> None:
    serving.engine.script = never_end()
    call = serving.generation.Generate(text_request(request_id="mine"))
    await call.read()
    _, error = await read_all(serving.generation.Generate(text_request(request_id="mine")))
    assert error is not None
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert reason_of(error) == "DUPLICATE_REQUEST_ID"
    await abort(serving, request_id="mine")
    call = serving.generation.Generate(text_request(request_id="mine"))
    assert (await call.read()).started.request_id == "mine"
    call.cancel()


@pytest.mark.parametrize("request_id", ["x" * 129, "with space", "new\nline", "é", "\x7f"])
async def test_a_request_id_that_no_log_could_hold_is_refused(serving: Serving, request_id: str) -> None:
    _, error = await read_all(serving.generation.Generate(text_request(request_id=request_id)))
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["request_id"]
    assert serving.engine.requests == []
