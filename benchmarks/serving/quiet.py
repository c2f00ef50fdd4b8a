"""Other work on the machine: waiting for its end before a turn, and telling how much of it fell into one.

Units: seconds of processor time, and cores (processor seconds a second). Systems that do not say count as quiet.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.serving.calibration import busy_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_SECONDS = 0.5
PAUSE_SECONDS = 2.0
QUIET_CORES = 0.15
LONGEST_WAIT_SECONDS = 240.0


class ForeignWork:
    """Counts what others do from now on: all work of the machine, less the child's and our own."""

    def __init__(self, child_seconds: Callable[[], float]) -> None:
        """`child_seconds` tells the processor time of the child that is being measured."""
        self._child_seconds = child_seconds
        self._began_at = time.monotonic()
        self._began = self._foreign()

    def cores(self) -> float | None:
        """How many cores others have kept busy since; None where the system does not say."""
        now = self._foreign()
        if now is None or self._began is None:
            return None
        return max(0.0, now - self._began) / (time.monotonic() - self._began_at)

    def _foreign(self) -> float | None:
        busy = busy_seconds()
        return None if busy is None else busy - self._child_seconds() - time.process_time()


class Quiet:
    """Waits for a quiet machine as long as its patience lasts, all waits together."""

    def __init__(self, patience_seconds: float) -> None:
        """Without patience nothing is ever waited for or done again."""
        self._patience_seconds = patience_seconds

    async def wait(self) -> None:
        """Return once nobody else works, or it was waited for long enough. All contestants must be paused."""
        began = time.monotonic()
        while self._patience_seconds > 0 and time.monotonic() - began < LONGEST_WAIT_SECONDS:
            work = ForeignWork(lambda: 0.0)
            await asyncio.sleep(WINDOW_SECONDS)
            if (work.cores() or 0.0) <= QUIET_CORES:
                return
            await asyncio.sleep(PAUSE_SECONDS)
            self._patience_seconds -= PAUSE_SECONDS + WINDOW_SECONDS

    def wants_another(self, foreign_cores: float | None, attempt_seconds: float) -> bool:
        """Whether a turn was disturbed so much that it should be done again; doing so costs patience."""
        if foreign_cores is None or foreign_cores <= QUIET_CORES or self._patience_seconds <= 0:
            return False
        self._patience_seconds -= attempt_seconds
        return True
