"""From a failed gRPC call to a typed error: by what the server said, else by what the call itself went through.

gRPC words what it saw for its own developers and changes it from version to version; here each case has one sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from mlxstream.errors import (
    AlreadyExistsError,
    AuthenticationError,
    DataLossError,
    DeadlineExceededError,
    ErrorDetails,
    FailedPreconditionError,
    FieldViolation,
    GenerationCancelledError,
    InvalidRequestError,
    LocalReason,
    MlxStreamError,
    NotFoundError,
    OutOfRangeError,
    OverloadedError,
    PromptTooLongError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)

STATUS_DETAILS_KEY = "grpc-status-details-bin"
CLASS_BY_REASON: Mapping[str, type[MlxStreamError]] = {"PROMPT_TOO_LONG": PromptTooLongError}
CLASS_BY_CODE: Mapping[grpc.StatusCode, type[MlxStreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: GenerationCancelledError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}

# What gRPC's TLS library says of a handshake that failed, and what it means. Another try changes none of them.
TLS_FAILURES: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the server at {target} speaks without TLS",
    "Hostname Verification": "the certificate of the server at {target} is for another name",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of the server at {target} cannot be trusted: {why}",
    "security handshaker": "the certificates or the key that were given for {target} cannot be used",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What the client knows of a call: whom it asked, and for how long at most (None: for ever)."""

    target: str
    timeout_seconds: float | None


def error_of(error: grpc.aio.AioRpcError, facts: CallFacts, generated_tokens: int | None = None) -> MlxStreamError:
    """The typed error of a failed call.

    Args:
        error: What gRPC raised.
        facts: Whom was asked, and for how long.
        generated_tokens: How many had arrived; None when not even the first event had.
    """
    details = details_of(error.trailing_metadata())
    code, text = error.code(), error.details() or error.code().name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and facts.timeout_seconds is not None:
        # The server's clock and ours end the same call: whichever is first, the caller reads the same.
        return _past_deadline(facts.timeout_seconds, generated_tokens or 0)
    if code is grpc.StatusCode.UNAVAILABLE and not details.reason:
        return _without_answer(text, facts.target, generated_tokens)
    chosen = CLASS_BY_REASON.get(details.reason) or CLASS_BY_CODE.get(code, ServerError)
    return chosen(text, code=code, details=details)


def client_was_closed() -> GenerationCancelledError:
    """The error of a call that was running when its client was closed, and of every later one."""
    details = ErrorDetails(reason=LocalReason.CLIENT_CLOSED)
    return GenerationCancelledError("the client was closed", code=grpc.StatusCode.CANCELLED, details=details)


def is_cancelled_by_its_owner() -> bool:
    """Whether somebody cancels this very task, rather than the call in it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _past_deadline(timeout_seconds: float, generated_tokens: int) -> DeadlineExceededError:
    message = f"no answer within {timeout_seconds:g} s"
    if generated_tokens:
        message = f"stopped by its deadline of {timeout_seconds:g} s after {_tokens(generated_tokens)}"
    values = {"timeout_seconds": f"{timeout_seconds:g}", "generated_tokens": str(generated_tokens)}
    details = ErrorDetails(reason=LocalReason.DEADLINE, metadata=values)
    return DeadlineExceededError(message, code=grpc.StatusCode.DEADLINE_EXCEEDED, details=details)


def _without_answer(text: str, target: str, generated_tokens: int | None) -> UnavailableError:
    """Tell a server that was lost, a name that leads nowhere, and one with which no connection came about."""
    cause = ""
    if generated_tokens is not None:
        reason, message = LocalReason.CONNECTION_LOST, f"{target} went away after {_tokens(generated_tokens)}"
    elif text.startswith("failed to connect"):
        reason, message, cause = _without_connection(text, target)
    elif "resol" in text:
        reason, message = LocalReason.UNRESOLVABLE_TARGET, f"the target {target} leads to no address"
    else:
        reason, message = LocalReason.CONNECTION_LOST, f"{target} went away before it answered ({text})"
    values = {"target": target, "generated_tokens": str(generated_tokens or 0)}
    if cause:
        values["cause"] = cause
    details = ErrorDetails(reason=reason, metadata=values)
    return UnavailableError(message, code=grpc.StatusCode.UNAVAILABLE, details=details)


def _without_connection(text: str, target: str) -> tuple[LocalReason, str, str]:
    """Tell an address at which nobody listens from a failed handshake: reason, message, and gRPC's word for it."""
    for cause, meaning in TLS_FAILURES.items():
        if cause in text:
            _, _, why = text.removesuffix(": OK").partition(f"{cause}: ")
            return LocalReason.TLS_FAILED, meaning.format(target=target, why=why or "no reason was given"), cause
    cause = text.rpartition(": ")[2]
    return LocalReason.UNREACHABLE, f"no server answers at {target} ({cause})", cause


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def details_of(trailers: grpc.aio.Metadata | None) -> ErrorDetails:
    """Unpack the rich status in the trailers; absent or malformed ones give empty details."""
    packed = trailers.get(STATUS_DETAILS_KEY) if trailers is not None else None
    if not isinstance(packed, bytes):
        return ErrorDetails()
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    try:
        for detail in status_pb2.Status.FromString(packed).details:
            # Each kind occurs at most once, so the first that unpacks it is the one.
            _ = detail.Unpack(info) or detail.Unpack(bad_request) or detail.Unpack(retry)
    except DecodeError:
        return ErrorDetails()
    return ErrorDetails(
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
        retry_after_seconds=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
    )
