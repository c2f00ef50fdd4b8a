"""The table from errors to statuses is total, and what it tells is safe to show and fits. See `test_error_table`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2

from engine.contracts import errors as contract
from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import error_pb2
from service.errors import RULES, abort, encode_status, presentable, status_of
from service.refusals import (
    InternalError,
    MalformedMessageError,
    MessageLateError,
    MessageTooLargeError,
    PermissionDeniedError,
    TakenOverError,
    UnauthenticatedError,
)
from tests.service.harness import Serving, details_of, read_all, reason_of, text_request, violated_fields

CODE = grpc.StatusCode

# One of each, with the status that callers must see.
EXAMPLES: list[tuple[contract.EngineError, grpc.StatusCode]] = [
    (contract.EngineError("a secret"), CODE.INTERNAL),
    (contract.ConfigurationError("blas", "not here"), CODE.FAILED_PRECONDITION),
    (contract.InvalidRequestError.of("options.top_p", "must be from 0 to 1"), CODE.INVALID_ARGUMENT),
    (contract.PromptTooLongError(prompt_tokens=200, context_length=128), CODE.INVALID_ARGUMENT),
    (contract.PromptOverLimitError(prompt_tokens=200, context_length=100), CODE.INVALID_ARGUMENT),
    (contract.ChatTemplateError("roles must alternate"), CODE.INVALID_ARGUMENT),
    (contract.UnsupportedOptionError("options.hlg", "not yet"), CODE.UNIMPLEMENTED),
    (contract.NotFoundError("model", "other"), CODE.NOT_FOUND),
    (contract.DuplicateRequestError("r-1"), CODE.ALREADY_EXISTS),
    (contract.OverloadedError("queue", limit=64, used=64, retry_after_seconds=1.5), CODE.RESOURCE_EXHAUSTED),
    (contract.QueueTimeError(limit_seconds=2.5, retry_after_seconds=1.0), CODE.RESOURCE_EXHAUSTED),
    (contract.InsufficientMemoryError(needed_bytes=2**40, budget_bytes=2**30), CODE.RESOURCE_EXHAUSTED),
    (contract.UnavailableError("loading"), CODE.UNAVAILABLE),
    (contract.EngineFailedError("c-1"), CODE.UNAVAILABLE),
    (contract.GenerationFailedError("c-2"), CODE.INTERNAL),
    (contract.GenerationAborted(AbortReason.REQUESTED), CODE.CANCELLED),
    (contract.GenerationAborted(AbortReason.DISCONNECTED), CODE.CANCELLED),
    (contract.GenerationAborted(AbortReason.DEADLINE), CODE.DEADLINE_EXCEEDED),
    (contract.GenerationAborted(AbortReason.SHUTDOWN), CODE.UNAVAILABLE),
    (contract.DurabilityError("g-1", "odd"), CODE.FAILED_PRECONDITION),
    (contract.CheckpointMismatchError("g-1", ["weights", "adapters"]), CODE.FAILED_PRECONDITION),
    (contract.CheckpointDamagedError("g-1", "checkpoint-64"), CODE.DATA_LOSS),
    (contract.ResumePointGoneError("g-1"), CODE.OUT_OF_RANGE),
    (TakenOverError("g-1"), CODE.CANCELLED),
    (contract.ArtifactError("a.gguf", "odd"), CODE.FAILED_PRECONDITION),
    (contract.MissingArtifactError("a.gguf", "no tensor"), CODE.FAILED_PRECONDITION),
    (contract.CorruptArtifactError("a.gguf", "cut"), CODE.DATA_LOSS),
    (contract.UnsupportedArtifactError("a.gguf", "Q2_K"), CODE.FAILED_PRECONDITION),
    (contract.MismatchedArtifactError("a/adapters.safetensors", "does not fit"), CODE.FAILED_PRECONDITION),
    (contract.GraphContractError("a secret"), CODE.INTERNAL),
    (MalformedMessageError("mlxstream.v1.GenerateRequest"), CODE.INVALID_ARGUMENT),
    (MessageTooLargeError(message_bytes=100, limit_bytes=64), CODE.RESOURCE_EXHAUSTED),
    (MessageLateError(limit_seconds=29.5), CODE.RESOURCE_EXHAUSTED),
    (UnauthenticatedError("no token"), CODE.UNAUTHENTICATED),
    (PermissionDeniedError("mlxstream.v1.AdminService", "admin"), CODE.PERMISSION_DENIED),
    (InternalError("c-3"), CODE.INTERNAL),
]
CONCEALED = (contract.EngineError, contract.GraphContractError)


def tree(root: type[contract.EngineError]) -> Iterator[type[contract.EngineError]]:
    """The product's classes: one that another test has made may still be there."""
    yield root
    for kind in root.__subclasses__():
        if kind.__module__.split(".")[0] in {"engine", "service"}:
            yield from tree(kind)


def named(value: object) -> str:
    return type(value).__name__ if isinstance(value, contract.EngineError) else getattr(value, "name", "")


def expected_reason(error: contract.EngineError) -> str:
    return "INTERNAL" if type(error) in CONCEALED else error.reason


def test_a_name_that_is_very_long_is_cut_before_it_is_shown() -> None:
    told = str(contract.NotFoundError("service", "x" * 1_000_000))
    assert len(told) < 300
    assert told.endswith("…'")


def test_every_class_of_the_tree_has_its_own_rule_and_an_example_and_nothing_else_has() -> None:
    """The examples are the rows of `test_error_table`; where classes may stand is a rule of the house."""
    classes = set(tree(contract.EngineError))
    assert len(classes) > 15
    assert set(RULES) == classes
    assert {type(error) for error, _ in EXAMPLES} == classes


def test_every_reason_to_abort_has_an_example() -> None:
    found = [error.abort_reason for error, _ in EXAMPLES if isinstance(error, contract.GenerationAborted)]
    assert set(found) == set(AbortReason)


def test_every_reason_is_in_the_schema_and_the_schema_has_no_other() -> None:
    reasons = {f"ERROR_REASON_{kind.reason}" for kind in tree(contract.EngineError)}
    assert reasons == set(error_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}


def test_rules_name_fields_that_their_errors_have() -> None:
    for error, _ in EXAMPLES:
        assert set(RULES[type(error)].metadata) <= set(vars(error)), type(error)


async def test_overload_says_when_to_come_back(serving: Serving) -> None:
    serving.engine.refusal = contract.OverloadedError("queue", limit=64, used=64, retry_after_seconds=1.5)
    _, error = await read_all(serving.generation.Generate(text_request()))
    assert error is not None
    details = details_of(error)
    assert details[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() == 1500
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1500"
    assert dict(details[error_details_pb2.ErrorInfo].metadata) == {"resource": "queue", "limit": "64", "used": "64"}


async def test_a_request_that_can_never_fit_is_told_not_to_come_back(serving: Serving) -> None:
    serving.engine.refusal = contract.InsufficientMemoryError(needed_bytes=2, budget_bytes=1)
    _, error = await read_all(serving.generation.Generate(text_request()))
    assert error is not None
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"


async def test_bad_input_names_every_bad_field(serving: Serving) -> None:
    options = {"temperature": -1.0, "top_p": 2.0, "stop_sequences": ["", "x"]}
    _, error = await read_all(serving.generation.Generate(text_request(options=options)))
    assert error is not None
    assert error.code() is CODE.INVALID_ARGUMENT
    assert set(violated_fields(error)) == {"options.temperature", "options.top_p", "options.stop_sequences[0]"}


async def test_an_unexpected_exception_shows_a_correlation_id_and_nothing_else(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.engine.refusal = KeyError("a secret")
    _, error = await read_all(serving.generation.Generate(text_request()))
    assert error is not None
    assert error.code() is CODE.INTERNAL
    assert "secret" not in error.details()
    correlation_id = details_of(error)[error_details_pb2.ErrorInfo].metadata["correlation_id"]
    assert correlation_id in error.details()
    assert correlation_id in caplog.text
    assert "a secret" in caplog.text


async def test_a_cancellation_that_is_not_the_callers_is_an_internal_error_and_leaves_nobody_hanging(
    serving: Serving,
) -> None:
    async def cancelled_elsewhere() -> None:
        raise asyncio.CancelledError

    serving.engine.acceptance = cancelled_elsewhere
    _, error = await asyncio.wait_for(read_all(serving.generation.Generate(text_request())), 60)
    assert error is not None
    assert error.code() is CODE.INTERNAL
    assert reason_of(error) == "INTERNAL"


def test_what_may_be_shown_is_left_as_it_is() -> None:
    for error, _ in EXAMPLES:
        assert (presentable(error, None) is error) == (type(error) not in CONCEALED)


def test_details_fit_into_trailers_however_large_the_error_is() -> None:
    violations = [contract.FieldViolation("options.x" * 100, "é" * 5000)] * 1000
    for error in (
        contract.InvalidRequestError(violations),
        contract.NotFoundError("model", "é" * 5000),
        contract.ChatTemplateError("\n" * 50_000),
    ):
        status = encode_status(error)
        percent_encoded_bytes = 3 * len(status.message.encode())
        assert percent_encoded_bytes + status.ByteSize() * 4 / 3 < 7 * 1024
        assert status.code == status_of(error).value[0]


async def test_a_status_that_reaches_nobody_ends_the_call_as_one_that_its_caller_left() -> None:
    class Gone:
        async def abort(self, *_status: object) -> None:
            raise grpc.aio.InternalError("the connection is gone")

    with pytest.raises(asyncio.CancelledError):
        await abort(Gone(), contract.UnavailableError("stopped", "the service is shutting down"))  # type: ignore[arg-type]
