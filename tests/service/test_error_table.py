"""Every failure in every phase of a call: the same code, reason and details, and no token that was sent is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from engine.contracts import errors as contract
from engine.contracts.results import FinishReason
from mlxstream.v1 import error_pb2, generation_pb2, result_pb2
from service.errors import RULES, is_retryable
from tests.service.fake_engine import FakeGeneration
from tests.service.harness import Serving, details_of, read_all, reason_of, text_request
from tests.service.test_errors import CONCEALED, EXAMPLES, expected_reason, named

TEXT = ("a", "b", "c")


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and what it had said until then."""

    failure: grpc.aio.AioRpcError
    responses: list[generation_pb2.GenerateResponse]

    @property
    def text(self) -> str:
        return "".join(response.chunk.text for response in self.responses)


def fails_after(error: contract.EngineError, *texts: str) -> Callable[[FakeGeneration], Awaitable[None]]:
    async def script(generation: FakeGeneration) -> None:
        generation.start()
        if texts:
            generation.say(*texts)
        generation.end(FinishReason.ERROR, error)

    return script


async def unary(serving: Serving) -> Outcome:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}))
    return Outcome(failure.value, [])


async def stream(serving: Serving) -> Outcome:
    responses, failure = await read_all(serving.generation.Generate(text_request()))
    assert failure is not None
    return Outcome(failure, responses)


async def unary_refused(serving: Serving, error: contract.EngineError) -> Outcome:
    serving.engine.refusal = error
    return await unary(serving)


async def unary_after_three_tokens(serving: Serving, error: contract.EngineError) -> Outcome:
    serving.engine.script = fails_after(error, *TEXT)
    return await unary(serving)


async def stream_refused(serving: Serving, error: contract.EngineError) -> Outcome:
    serving.engine.refusal = error
    outcome = await stream(serving)
    assert outcome.responses == []
    return outcome


async def stream_before_the_first_token(serving: Serving, error: contract.EngineError) -> Outcome:
    serving.engine.script = fails_after(error)
    outcome = await stream(serving)
    assert outcome.text == ""
    assert_finished_tells(outcome, tokens=0)
    return outcome


async def stream_after_three_tokens(serving: Serving, error: contract.EngineError) -> Outcome:
    serving.engine.script = fails_after(error, *TEXT)
    outcome = await stream(serving)
    assert outcome.text == "abc"
    assert_finished_tells(outcome, tokens=3)
    return outcome


PHASES = (
    unary_refused,
    unary_after_three_tokens,
    stream_refused,
    stream_before_the_first_token,
    stream_after_three_tokens,
)


def assert_finished_tells(outcome: Outcome, *, tokens: int) -> None:
    """The last message says what the status repeats, with the account of what was done."""
    assert outcome.responses[0].HasField("started")
    assert [response.sequence for response in outcome.responses] == list(range(1, len(outcome.responses) + 1))
    finished = outcome.responses[-1].finished
    assert finished.finish_reason == result_pb2.FINISH_REASON_ERROR
    assert finished.stats.generated_tokens == tokens
    assert error_pb2.ErrorReason.Name(finished.error.reason) == f"ERROR_REASON_{reason_of(outcome.failure)}"
    assert finished.error.message == outcome.failure.details()
    info = details_of(outcome.failure)[error_details_pb2.ErrorInfo]
    assert finished.error.correlation_id == info.metadata.get("correlation_id", "")


def expected_details(error: contract.EngineError) -> set[type[Message]]:
    kinds: set[type[Message]] = {error_details_pb2.ErrorInfo}
    if isinstance(error, contract.InvalidRequestError):
        kinds.add(error_details_pb2.BadRequest)
    if isinstance(error, contract.OverloadedError):
        kinds.add(error_details_pb2.RetryInfo)
    return kinds


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize(("error", "status"), EXAMPLES, ids=named)
async def test_a_failure_is_told_the_same_in_every_phase(
    serving: Serving,
    error: contract.EngineError,
    status: grpc.StatusCode,
    phase: Callable[[Serving, contract.EngineError], Awaitable[Outcome]],
) -> None:
    outcome = await phase(serving, error)
    details = details_of(outcome.failure)
    assert outcome.failure.code() is status
    assert status is not grpc.StatusCode.UNKNOWN
    assert reason_of(outcome.failure) == expected_reason(error)
    assert set(details) == expected_details(error)
    metadata = dict(details[error_details_pb2.ErrorInfo].metadata)
    if type(error) in CONCEALED:
        assert "secret" not in outcome.failure.details()
        assert metadata.keys() == {"correlation_id"}
    else:
        assert metadata == {name: str(getattr(error, name)) for name in RULES[type(error)].metadata}
    if outcome.responses:
        assert outcome.responses[-1].finished.error.retryable == is_retryable(error)


def test_only_what_may_succeed_later_is_called_retryable() -> None:
    retryable = {type(error) for error, _ in EXAMPLES if is_retryable(error)}
    assert retryable >= {contract.OverloadedError, contract.QueueTimeError, contract.UnavailableError}
    for error, status in EXAMPLES:
        overloaded = isinstance(error, contract.OverloadedError)
        assert is_retryable(error) == (status is grpc.StatusCode.UNAVAILABLE or overloaded), error
