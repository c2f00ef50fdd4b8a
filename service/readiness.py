"""Why a replica wants no new work: one name for each reason, and whether memory has run out.

Memory has run out when no request fits any more, which is arithmetic and told at once; or when the machine or the
device has had next to none left for a while. That ends when there has been plenty for longer, so that readiness does
not flap.
Clocks are arguments; units: bytes and seconds.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.memory import MemoryReading

LOW_BYTES: Final = 32 * 1024 * 1024
"""With less free memory than this (or than the smallest request takes) the next allocation may end the process."""
AMPLE_FACTOR: Final = 2
"""So many times as much must be free again."""
AMPLE_DEVICE_SHARE: Final = 0.95
"""And mlx must hold no more than this share of what it should hold at most."""
LOW_SECONDS: Final = 5.0
AMPLE_SECONDS: Final = 15.0


class NotReady(enum.Enum):
    """Reasons; the values are those of metrics and log lines."""

    LOADING = "loading"
    NO_MODEL = "no_model"
    STALLED = "stalled"
    OUT_OF_MEMORY = "out_of_memory"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPING = "stopping"


class MemoryWatch:
    """Tells want of memory that lasts from that of a moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """There is enough; `clock` counts seconds."""
        self._clock = clock
        self._is_short = False
        self._agreed_at = clock()

    def is_short(self, reading: MemoryReading | None) -> bool:
        """Whether memory has run out, with one more reading; None says nothing."""
        if reading is None:
            return False
        if reading.smallest_request_bytes > reading.state_limit_bytes:
            return True
        now = self._clock()
        differs = _is_ample(reading) if self._is_short else _is_low(reading)
        if not differs:
            self._agreed_at = now
        elif now - self._agreed_at >= (AMPLE_SECONDS if self._is_short else LOW_SECONDS):
            self._is_short, self._agreed_at = not self._is_short, now
        return self._is_short


def _low_bytes(reading: MemoryReading) -> int:
    return max(LOW_BYTES, reading.smallest_request_bytes)


def _is_low(reading: MemoryReading) -> bool:
    limit_bytes = reading.active_limit_bytes
    return reading.free_bytes < _low_bytes(reading) or (limit_bytes is not None and reading.active_bytes > limit_bytes)


def _is_ample(reading: MemoryReading) -> bool:
    limit_bytes = reading.active_limit_bytes
    return reading.free_bytes >= AMPLE_FACTOR * _low_bytes(reading) and (
        limit_bytes is None or reading.active_bytes <= AMPLE_DEVICE_SHARE * limit_bytes
    )
