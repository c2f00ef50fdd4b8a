"""Errors that the service adds to the engine's tree: whom it refuses, what it cannot send, and faults of its own.

Imports nothing of gRPC, so that an entrance is checked before that is there. `service.errors` tells each as a status.
"""

from __future__ import annotations

import math
from typing import Final

from engine.contracts.errors import EngineError, OverloadedError

RETRY_SECONDS: Final = 1.0


class MalformedMessageError(EngineError):
    """The bytes of a request are no message of its type; bad UTF-8 in a string is the usual cause."""

    reason = "MALFORMED_MESSAGE"

    def __init__(self, message_name: str) -> None:
        self.message_name = message_name
        super().__init__(
            f"the bytes are no valid {message_name} (every string must be UTF-8), or are nested too deeply"
        )


class MessageTooLargeError(EngineError):
    """A message over a bound, by default an answer; `message_bytes` are those known when that was clear.

    `what` says so, with places for both numbers.
    """

    reason = "MESSAGE_TOO_LARGE"

    def __init__(
        self,
        *,
        message_bytes: int,
        limit_bytes: int,
        what: str = "the answer has {} bytes or more, {} are allowed; stream it with Generate",
    ) -> None:
        self.message_bytes = message_bytes
        self.limit_bytes = limit_bytes
        super().__init__(what.format(message_bytes, limit_bytes))


class MessageLateError(OverloadedError):
    """A message has not come to its end in time. Units: whole seconds, rounded up."""

    def __init__(self, *, limit_seconds: float) -> None:
        whole_seconds = math.ceil(limit_seconds)
        super().__init__(
            "the time in which a message must arrive, in seconds",
            limit=whole_seconds,
            used=whole_seconds,
            retry_after_seconds=RETRY_SECONDS,
        )


class UnauthenticatedError(EngineError):
    """The caller has not said who they are, or cannot prove it. The message never holds what was presented."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(EngineError):
    """The caller is known, and this service is not open to them."""

    reason = "PERMISSION_DENIED"

    def __init__(self, service: str, permission: str) -> None:
        self.service = service
        self.permission = permission
        super().__init__(f"{service} needs the permission {permission!r}, which this token does not have")


class InternalError(EngineError):
    """A fault of ours that is no error of the tree, or one whose text is not for callers."""

    reason = "INTERNAL"

    def __init__(self, correlation_id: str) -> None:
        self.correlation_id = correlation_id
        super().__init__(f"internal error (correlation id {correlation_id})")


class TakenOverError(EngineError):
    """Another call has resumed the generation that this one was reading."""

    reason = "TAKEN_OVER"

    def __init__(self, generation_id: str) -> None:
        self.generation_id = generation_id
        super().__init__(f"another call has resumed generation {generation_id}")
