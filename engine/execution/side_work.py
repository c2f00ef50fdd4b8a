"""Work on a few threads beside the loop: tokenizing, templates, the decoding of images. What may wait is bounded.

Each kind has threads of its own, so that no text waits for pixels. What a caller abandons while it waits is dropped;
what runs is small enough to be waited for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import OverloadedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")

THREADS: Final = 2
MAX_JOBS: Final = 1024
RETRY_SECONDS: Final = 1.0


class SideWork:
    """Runs functions on one kind of input for the loop. Used on the loop alone."""

    def __init__(self, kind: str) -> None:
        """Work on inputs called `kind`, such as "text". Threads start with the first job."""
        self._kind = kind
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"mlx-stream-{kind}")
        self._jobs = 0

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Start work that no caller waits for, such as opening a model."""
        return self._pool.submit(function, *arguments)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run one caller's work.

        Raises:
            OverloadedError: too much waits already.
            UnavailableError: the pool was closed meanwhile.
        """
        if self._jobs >= MAX_JOBS:
            raise OverloadedError(
                f"the queue of {self._kind}s", limit=MAX_JOBS, used=self._jobs, retry_after_seconds=RETRY_SECONDS
            )
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError("stopped", "the service is shutting down") from None
        finally:
            self._jobs -= 1

    def close(self) -> None:
        """Drop what waits, and let what runs end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
