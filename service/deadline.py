"""A partial result before the deadline: when a generation must be told to end, so that what it has still arrives.

It leaves at the end of the step in hand, so the margin follows how long steps take. Units: seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Final, Protocol

from engine.contracts.cancellation import AbortReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from service.delivery import Delivery
    from service.rpc import Context

# Without news of the engine, this share of the time given, and at most a second.
MARGIN_SHARE: Final = 0.1
MAX_SHARE_SECONDS: Final = 1.0
# The step in hand and the one that is dispatched already, and the way to the caller.
MARGIN_STEPS: Final = 2
SENDING_SECONDS: Final = 0.05
# However long steps take, this much of the time given is for generating.
MAX_MARGIN_SHARE: Final = 0.5


class Abortable(Protocol):
    """What can be told to end."""

    def abort(self, reason: AbortReason) -> None:
        """End at the next safe point."""


class PartialDeadline:
    """The end of one call that wants what there is rather than nothing. Made when the call arrives."""

    def __init__(self, given_seconds: float | None, step_seconds: Callable[[], float]) -> None:
        """`given_seconds` are left from now on (None: for ever); `step_seconds` tells how long steps take now."""
        self._given_seconds = math.inf if given_seconds is None else max(0.0, given_seconds)
        self._step_seconds = step_seconds
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + self._given_seconds
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, context: Context, delivery: Delivery, step_seconds: Callable[[], float]) -> PartialDeadline:
        """The call's own deadline if `delivery` asks for a partial result, else none."""
        return cls(context.time_remaining() if delivery.partial_at_deadline else None, step_seconds)

    @contextlib.contextmanager
    def ending(self, generation: Abortable) -> Iterator[None]:
        """Abort `generation` in time, unless it leaves this block before."""
        if math.isfinite(self._given_seconds):
            self._look(generation)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _look(self, generation: Abortable) -> None:
        """Abort, or look again when it may be time: at the widest margin first, since steps may grow longer."""
        remaining_seconds = self._at - self._loop.time()
        margin = margin_seconds(self._given_seconds, self._step_seconds())
        widest = MAX_MARGIN_SHARE * self._given_seconds
        if remaining_seconds <= margin:
            generation.abort(AbortReason.DEADLINE)
            return
        wait_seconds = remaining_seconds - (widest if remaining_seconds > widest else margin)
        self._timer = self._loop.call_later(wait_seconds, self._look, generation)


def margin_seconds(given_seconds: float, step_seconds: float) -> float:
    """How long before the deadline a generation is told to end."""
    share = min(MAX_SHARE_SECONDS, MARGIN_SHARE * given_seconds)
    return min(max(share, MARGIN_STEPS * step_seconds + SENDING_SECONDS), MAX_MARGIN_SHARE * given_seconds)
