"""The errors of the client, typed by what a caller would do about them.

MlxStreamError
├── InvalidRequestError         a field is wrong; `violations` names each
│   └── PromptTooLongError      the prompt leaves no room in the context
├── OutOfRangeError             the point to resume from is no longer held
├── NotFoundError               no model, adapter or generation of this name
├── AlreadyExistsError          the request id is in use by a live generation
├── FailedPreconditionError     an adapter, a checkpoint or a model file does not fit
├── OverloadedError             a bounded resource is full; see `retry_after_seconds`
├── UnavailableError            not reachable, loading, draining: try again later
├── UnsupportedError            a known option or RPC that this server or model cannot honour
├── AuthenticationError         no credentials, wrong ones, or not enough rights
├── DeadlineExceededError       the call's deadline passed; what had arrived stays in the stream
├── GenerationCancelledError    the generation was ended by somebody else, or with its client
├── DataLossError               stored data is damaged
├── ServerError                 the server's fault; `metadata` holds a correlation id
└── StreamCutError              the stream ended without its last event
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc


class LocalReason(enum.StrEnum):
    """Reasons that the client itself gives: what it saw of a call without a word from the server."""

    DEADLINE = "DEADLINE"
    UNREACHABLE = "UNREACHABLE"
    TLS_FAILED = "TLS_FAILED"
    UNRESOLVABLE_TARGET = "UNRESOLVABLE_TARGET"
    CONNECTION_LOST = "CONNECTION_LOST"
    NOT_READY = "NOT_READY"
    CLIENT_CLOSED = "CLIENT_CLOSED"
    STREAM_CUT = "STREAM_CUT"


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
        reason: Name of the schema's `ErrorReason`, such as "PROMPT_TOO_LONG", or of a `LocalReason`; empty when a
            server that is not ours gave none.
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


class OutOfRangeError(MlxStreamError):
    """The point from which a generation was to be resumed is no longer held."""


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
    """The call's deadline passed before its end; `metadata` holds `timeout_seconds` and `generated_tokens`."""


class GenerationCancelledError(MlxStreamError):
    """The generation was ended by an abort or a shutdown that did not come from this stream."""


class DataLossError(MlxStreamError):
    """Stored data is damaged beyond repair."""


class ServerError(MlxStreamError):
    """The server is at fault."""


class StreamCutError(MlxStreamError):
    """The stream ended without its last event, although its status says OK."""

    def __init__(self) -> None:
        details = ErrorDetails(reason=LocalReason.STREAM_CUT)
        super().__init__("the stream ended without its last event", code=grpc.StatusCode.DATA_LOSS, details=details)
