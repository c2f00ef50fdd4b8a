"""The abort signal: how cancellation travels from any cause to the engine thread.

One controller per generation, owned by the front door; the signal is its read-only face. Raising it is
idempotent, thread-safe and never blocks; the first reason wins.
"""

from __future__ import annotations

import threading

from engine.contracts.results import AbortReason

__all__ = ["AbortController", "AbortReason", "AbortSignal"]


class AbortSignal:
    """Read-only view of an abort. Cheap to poll: one attribute read, no lock."""

    __slots__ = ("_reason",)

    def __init__(self) -> None:
        self._reason: AbortReason | None = None

    @property
    def reason(self) -> AbortReason | None:
        """Why the generation was aborted, or None while it was not."""
        return self._reason

    @property
    def aborted(self) -> bool:
        """Whether the abort was raised."""
        return self._reason is not None


class AbortController:
    """Owner's side of an abort signal."""

    __slots__ = ("_lock", "signal")

    def __init__(self) -> None:
        self.signal = AbortSignal()
        self._lock = threading.Lock()

    def abort(self, reason: AbortReason) -> bool:
        """Raise the signal. Returns whether this call was the first."""
        with self._lock:
            if self.signal._reason is not None:
                return False
            self.signal._reason = reason
        return True
