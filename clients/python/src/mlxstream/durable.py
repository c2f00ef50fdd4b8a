"""How a stream survives, what its owner is told meanwhile, and which losses it can survive. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from mlxstream.errors import (
    LocalReason,
    MlxStreamError,
    OverloadedError,
    ServerError,
    StreamCutError,
    UnavailableError,
)

# What a lost connection can look like where gRPC does not say that the server is unavailable.
TRANSPORT_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The stream was lost, or could not be resumed; after `pause_seconds` the next try is made.

    `attempt` counts the tries since the last message. `generated_tokens` have been handed out.
    """

    error: MlxStreamError
    attempt: int
    pause_seconds: float
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The stream goes on. `resumed_tokens` were there already when it did, those handed out before included."""

    attempt: int
    generated_tokens: int
    resumed_tokens: int


DurableEvent = Interruption | Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """How a stream survives.

    Attributes:
        on_event: Called with each `Interruption` and `Resumption`, on the client's event loop; it must not block.
        patience_seconds: Longest time without a message, from the loss on; then the error is raised. The deadline of
            the whole stream holds besides.
        first_patience_seconds: The same for a server that was never heard of: it may be starting, or a mistake.
    """

    on_event: Callable[[DurableEvent], None] | None = None
    patience_seconds: float = 300.0
    first_patience_seconds: float = 10.0


def is_transient(error: MlxStreamError) -> bool:
    """Whether the same call may succeed soon: the server is away, restarts, or is full and says for how long."""
    if isinstance(error, UnavailableError | StreamCutError):
        return error.reason != LocalReason.TLS_FAILED
    if isinstance(error, OverloadedError):
        return error.retry_after_seconds is not None
    return isinstance(error, ServerError) and error.code in TRANSPORT_CODES and not error.reason
