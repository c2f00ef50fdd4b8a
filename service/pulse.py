"""The server's own heartbeat on the loop: remembers counters for rates, and measures how late timers are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from service.load_meter import LoadMeter
    from service.measures import Measures

PULSE_SECONDS: Final = 0.5


async def beat(meter: LoadMeter, metrics: Measures) -> None:
    """Sample until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PULSE_SECONDS
        await asyncio.sleep(PULSE_SECONDS)
        late_seconds = max(0.0, loop.time() - due)
        metrics.looked_at_loop(late_seconds=late_seconds, tasks=len(asyncio.all_tasks(loop)))
        meter.sample()
