"""How a generation ends before its own end, whatever its method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import GenerationAborted, UnavailableError
from engine.contracts.results import AbortReason, FinishReason

if TYPE_CHECKING:
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.errors import EngineError


def abort_outcome(signal: AbortSignal) -> tuple[FinishReason, EngineError]:
    """What a caller is told when `signal` was raised."""
    reason = signal.reason or AbortReason.REQUESTED
    if reason is AbortReason.SHUTDOWN:
        return FinishReason.ERROR, UnavailableError("stopped", "the service is shutting down")
    kind = FinishReason.DEADLINE if reason is AbortReason.DEADLINE else FinishReason.CANCELLED
    return kind, GenerationAborted(reason)
