"""The errors of the client, typed by what a caller would do about them.

MlxStreamError
├── InvalidRequestError         a field is wrong; `violations` names each (also OUT_OF_RANGE)
│   └── PromptTooLongError      the prompt leaves no room in the context
├── NotFoundError               no model, adapter or generation of this name
├── AlreadyExistsError          the request id is in use by a live generation
├── FailedPreconditionError     an adapter, a checkpoint or a model file does not fit
├── OverloadedError             a bounded resource is full; see `retry_after_seconds`
├── UnavailableError            not reachable, loading, draining: try again later
├── UnsupportedError            a known option or RPC that this server or model cannot honour
├── AuthenticationError         no credentials, wrong ones, or not enough rights
├── DeadlineExceededError       the call's deadline passed
├── GenerationCancelledError    the generation was ended by somebody else
├── DataLossError               stored data is damaged
├── ServerError                 the server's fault; `metadata` holds a correlation id
└── StreamCutError              the stream ended without its last event
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path in the schema, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What a status carries beside its code and message; empty where the server said nothing."""

    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_seconds: float | None = None


class MlxStreamError(Exception):
    """Root of the tree.

    Attributes:
        code: Status code of the call.
        message: What happened, for people.
        reason: Name of the schema's `ErrorReason`, such as "PROMPT_TOO_LONG"; empty when the server gave none.
        metadata: The values that the message speaks of, by name.
        violations: The bad fields of the request.
        retry_after_seconds: How long the server asks to wait before another try; None when it does not say.
    """

    def __init__(self, message: str, *, code: grpc.StatusCode, details: ErrorDetails | None = None) -> None:
        details = details or ErrorDetails()
        self.code = code
        self.message = message
        self.reason = details.reason
        self.metadata = details.metadata
        self.violations = details.violations
        self.retry_after_seconds = details.retry_after_seconds
        super().__init__(message)


class InvalidRequestError(MlxStreamError):
    """The request can never succeed as it stands."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a new token; `metadata` holds `prompt_tokens` and `context_length`."""


class NotFoundError(MlxStreamError):
    """No model, adapter or generation has this name."""


class AlreadyExistsError(MlxStreamError):
    """The request id belongs to a live generation."""


class FailedPreconditionError(MlxStreamError):
    """An adapter, a checkpoint or a model file does not fit what is served."""


class OverloadedError(MlxStreamError):
    """A bounded resource is full."""


class UnavailableError(MlxStreamError):
    """The server cannot be reached, or cannot take work now."""


class UnsupportedError(MlxStreamError):
    """A known option or RPC that this server or model cannot honour."""


class AuthenticationError(MlxStreamError):
    """The credentials are missing, wrong, or without the right to this call."""


class DeadlineExceededError(MlxStreamError):
    """The call's deadline passed before its end."""


class GenerationCancelledError(MlxStreamError):
    """The generation was ended by an abort or a shutdown that did not come from this stream."""


class DataLossError(MlxStreamError):
    """Stored data is damaged beyond repair."""


class ServerError(MlxStreamError):
    """The server is at fault."""


class StreamCutError(MlxStreamError):
    """The stream ended without its last event, although its status says OK."""

    def __init__(self) -> None:
        super().__init__("the stream ended without its last event", code=grpc.StatusCode.DATA_LOSS)


CLASS_BY_REASON: Mapping[str, type[MlxStreamError]] = {"PROMPT_TOO_LONG": PromptTooLongError}
CLASS_BY_CODE: Mapping[grpc.StatusCode, type[MlxStreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
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


def error_of(error: grpc.aio.AioRpcError) -> MlxStreamError:
    """The typed error of a failed call: by its reason where one has a class of its own, else by its code."""
    details = details_of(error.trailing_metadata())
    chosen = CLASS_BY_REASON.get(details.reason) or CLASS_BY_CODE.get(error.code(), ServerError)
    return chosen(error.details() or error.code().name, code=error.code(), details=details)


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
    except ValueError:  # also protobuf's DecodeError
        return ErrorDetails()
    return ErrorDetails(
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
        retry_after_seconds=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
    )
