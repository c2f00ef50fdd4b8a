"""Waiting for what must come: for a condition, never for a time, and longer than any machine should need."""

import asyncio
from collections.abc import Callable

# Well under the time that a test may take, so that what never came is told where it was waited for.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - any condition of a test
            await asyncio.sleep(0.005)
