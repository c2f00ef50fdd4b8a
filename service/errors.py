"""From errors to gRPC: one table from error class to status, and google.rpc details for every failure.

Texts of errors are for callers; of our own faults they see a correlation id alone, and the log holds the cause.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from engine.contracts import errors as contract
from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import error_pb2
from service.paths import in_schema_terms
from service.refusals import (
    InternalError,
    MalformedMessageError,
    MessageLateError,
    MessageTooLargeError,
    PermissionDeniedError,
    TakenOverError,
    UnauthenticatedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

logger = logging.getLogger(__name__)

DOMAIN: Final = "mlxstream.v1"
# Clients repeat RESOURCE_EXHAUSTED unless they are told how long to wait, or that it is of no use.
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
NO_USE_TO_RETRY: Final = "-1"
# Many clients take at most 8 KiB of trailers, in which the message travels twice, percent-encoded and in base64.
MAX_MESSAGE_BYTES: Final = 600
MAX_VIOLATIONS_BYTES: Final = 1500
MAX_METADATA_BYTES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one class of error is told. `metadata` names the fields that ErrorInfo repeats.

    `concealed`: the text is not for callers; an `InternalError` goes in its place.
    """

    status: grpc.StatusCode
    metadata: tuple[str, ...] = ()
    retryable: bool = False
    concealed: bool = False


_CODE = grpc.StatusCode
RULES: Final[Mapping[type[contract.EngineError], Rule]] = MappingProxyType(
    {
        contract.EngineError: Rule(status=_CODE.INTERNAL, concealed=True),
        contract.ConfigurationError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("setting",)),
        contract.InvalidRequestError: Rule(status=_CODE.INVALID_ARGUMENT),
        contract.PromptTooLongError: Rule(status=_CODE.INVALID_ARGUMENT, metadata=("prompt_tokens", "context_length")),
        contract.PromptOverLimitError: Rule(
            status=_CODE.INVALID_ARGUMENT, metadata=("prompt_tokens", "context_length")
        ),
        contract.ChatTemplateError: Rule(status=_CODE.INVALID_ARGUMENT),
        MalformedMessageError: Rule(status=_CODE.INVALID_ARGUMENT, metadata=("message_name",)),
        contract.UnsupportedOptionError: Rule(status=_CODE.UNIMPLEMENTED, metadata=("option",)),
        contract.NotFoundError: Rule(status=_CODE.NOT_FOUND, metadata=("kind", "name")),
        contract.DuplicateRequestError: Rule(status=_CODE.ALREADY_EXISTS, metadata=("request_id",)),
        contract.OverloadedError: Rule(
            status=_CODE.RESOURCE_EXHAUSTED, metadata=("resource", "limit", "used"), retryable=True
        ),
        contract.QueueTimeError: Rule(
            status=_CODE.RESOURCE_EXHAUSTED, metadata=("resource", "limit", "used"), retryable=True
        ),
        contract.InsufficientMemoryError: Rule(
            status=_CODE.RESOURCE_EXHAUSTED, metadata=("needed_bytes", "budget_bytes")
        ),
        MessageLateError: Rule(status=_CODE.RESOURCE_EXHAUSTED, metadata=("resource", "limit", "used"), retryable=True),
        MessageTooLargeError: Rule(status=_CODE.RESOURCE_EXHAUSTED, metadata=("message_bytes", "limit_bytes")),
        contract.UnavailableError: Rule(status=_CODE.UNAVAILABLE, metadata=("state",), retryable=True),
        UnauthenticatedError: Rule(status=_CODE.UNAUTHENTICATED),
        PermissionDeniedError: Rule(status=_CODE.PERMISSION_DENIED, metadata=("service", "permission")),
        contract.EngineFailedError: Rule(status=_CODE.UNAVAILABLE, metadata=("correlation_id",), retryable=True),
        contract.GenerationFailedError: Rule(status=_CODE.INTERNAL, metadata=("correlation_id",)),
        InternalError: Rule(status=_CODE.INTERNAL, metadata=("correlation_id",)),
        contract.GenerationAborted: Rule(status=_CODE.CANCELLED),
        contract.DurabilityError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("generation_id",)),
        contract.CheckpointMismatchError: Rule(
            status=_CODE.FAILED_PRECONDITION, metadata=("generation_id", "differences")
        ),
        contract.CheckpointDamagedError: Rule(status=_CODE.DATA_LOSS, metadata=("generation_id", "file")),
        contract.ResumePointGoneError: Rule(status=_CODE.OUT_OF_RANGE, metadata=("generation_id",)),
        TakenOverError: Rule(status=_CODE.CANCELLED, metadata=("generation_id",)),
        contract.ArtifactError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("file",)),
        contract.MissingArtifactError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("file",)),
        contract.CorruptArtifactError: Rule(status=_CODE.DATA_LOSS, metadata=("file",)),
        contract.UnsupportedArtifactError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("file",)),
        contract.MismatchedArtifactError: Rule(status=_CODE.FAILED_PRECONDITION, metadata=("file",)),
        contract.GraphContractError: Rule(status=_CODE.INTERNAL, concealed=True),
    }
)


def rule_of(error: contract.EngineError) -> Rule:
    """The rule of an error: its own class's, else that of the nearest ancestor."""
    return next(RULES[kind] for kind in type(error).__mro__ if kind in RULES)


def status_of(error: contract.EngineError) -> grpc.StatusCode:
    """The status that tells an error; an abort is told by its reason."""
    if isinstance(error, contract.GenerationAborted):
        return {
            AbortReason.DEADLINE: _CODE.DEADLINE_EXCEEDED,
            AbortReason.SHUTDOWN: _CODE.UNAVAILABLE,
        }.get(error.abort_reason, _CODE.CANCELLED)
    return rule_of(error).status


def is_retryable(error: contract.EngineError) -> bool:
    """Whether the same request may succeed later."""
    return rule_of(error).retryable or status_of(error) is _CODE.UNAVAILABLE


def presentable(error: BaseException, request: Message | None) -> contract.EngineError:
    """The error as the sender of `request` may see it (None: it could not be read).

    Fields are called as the schema does. What must be concealed is logged under a fresh correlation id.
    """
    if isinstance(error, contract.EngineError) and not rule_of(error).concealed:
        return in_schema_terms(error, request) if request is not None else error
    concealed = InternalError(uuid.uuid4().hex[:16])
    fields = {"request_id": _request_id(request)}
    logger.error("correlation_id=%s", concealed.correlation_id, exc_info=error, extra={"fields": fields})
    return concealed


def _request_id(request: Message | None) -> str | None:
    """The caller's name for what went wrong, where its message has one."""
    if request is None or "request_id" not in request.DESCRIPTOR.fields_by_name:
        return None
    return getattr(request, "request_id", None) or None


def encode_error(error: contract.EngineError) -> error_pb2.GenerationError:
    """The error inside a stream. `error` must be presentable."""
    return error_pb2.GenerationError(
        reason=f"ERROR_REASON_{error.reason}",
        message=_cut(str(error), MAX_MESSAGE_BYTES),
        retryable=is_retryable(error),
        correlation_id=_metadata(error).get("correlation_id", ""),
    )


def encode_status(error: contract.EngineError) -> status_pb2.Status:
    """The error as google.rpc.Status. `error` must be presentable."""
    status = status_pb2.Status(code=status_of(error).value[0], message=_cut(str(error), MAX_MESSAGE_BYTES))
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_metadata(error))
    )
    if isinstance(error, contract.InvalidRequestError):
        status.details.add().Pack(_bad_request(error))
    if isinstance(error, contract.OverloadedError):
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_seconds)))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: contract.EngineError) -> None:
    """End the call with the status of `error`, which must be presentable. Its handler then returns None.

    gRPC keeps its own error with the call, and raises it again once the handler has returned. With a traceback that
    error would hold the handler's frame, and so the request, until somebody looks for circles.

    Raises:
        CancelledError: the connection is gone, and nobody is left to be told.
    """
    status = encode_status(error)
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if isinstance(error, contract.OverloadedError):
        trailers.append((PUSHBACK_KEY, str(round(1000 * error.retry_after_seconds))))
    elif status_of(error) is _CODE.RESOURCE_EXHAUSTED:
        trailers.append((PUSHBACK_KEY, NO_USE_TO_RETRY))
    try:
        await context.abort(status_of(error), status.message, tuple(trailers))
    except grpc.aio.AbortError as ended:
        ended.__traceback__ = ended.__context__ = None
    except grpc.aio.InternalError:  # gRPC would log it as an error of ours
        raise asyncio.CancelledError from None


def _metadata(error: contract.EngineError) -> dict[str, str]:
    return {name: _cut(str(getattr(error, name)), MAX_METADATA_BYTES) for name in rule_of(error).metadata}


def _bad_request(error: contract.InvalidRequestError) -> error_details_pb2.BadRequest:
    """The violations, as many as trailers can carry."""
    bad_request = error_details_pb2.BadRequest()
    for violation in error.violations:
        bad_request.field_violations.add(
            field=_cut(violation.field, MAX_METADATA_BYTES),
            description=_cut(violation.description, MAX_MESSAGE_BYTES),
            reason=error.reason,
        )
        if bad_request.ByteSize() > MAX_VIOLATIONS_BYTES - MAX_MESSAGE_BYTES - MAX_METADATA_BYTES:
            break
    return bad_request


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(1e9 * seconds))
    return duration


def _cut(text: str, limit_bytes: int) -> str:
    """`text`, cut to `limit_bytes` of UTF-8 between characters."""
    encoded = text[: limit_bytes + 1].encode("utf-8", "replace")  # no character has less than one byte
    if len(encoded) <= limit_bytes:
        return encoded.decode("utf-8")
    return encoded[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
