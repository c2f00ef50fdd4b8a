"""One thread that does work on a disk, in order, for callers who wait for nothing. Units: bytes and seconds."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class DiskWorker:
    """Runs tasks one after the other, and one of its own before them and, if wished, whenever there were none."""

    def __init__(
        self, name: str, *, idle: Callable[[], None], idle_seconds: float | None, failed: Callable[[OSError], None]
    ) -> None:
        """Start with `idle`.

        Args:
            name: of the thread.
            idle: what is done first, and then every `idle_seconds` without a task.
            idle_seconds: see there; None: never again.
            failed: is told of what the system has refused; other faults are logged as ours.
        """
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._failed = failed
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Callable[[], None], int]] = deque([(idle, 0)])
        self._running_bytes = 0
        self._is_running = False
        self._is_closing = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def held_bytes(self) -> int:
        """Bytes that tasks hold, those of the one in hand included."""
        with self._changed:
            return self._running_bytes + sum(nbytes for _, nbytes in self._tasks)

    def submit(self, task: Callable[[], None], nbytes: int = 0) -> None:
        """Have `task` done after all others, holding `nbytes` until then; at once, if the worker has ended."""
        with self._changed:
            has_ended = self._has_ended
            if not has_ended:
                self._tasks.append((task, nbytes))
                self._changed.notify_all()
        if has_ended:
            self._do(task)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until everything is done; returns whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and not self._is_running, seconds)

    def close(self, seconds: float) -> None:
        """Do what is queued, for so long."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._do(task)
            del task

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except OSError as error:
            self._failed(error)
        except Exception:
            logger.exception("work on the disk has failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._is_running, self._running_bytes = False, 0
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._tasks or self._is_closing, self._idle_seconds):
                self._tasks.append((self._idle, 0))
            if not self._tasks:
                self._has_ended = True
                return None
            task, self._running_bytes = self._tasks.popleft()
            self._is_running = True
            return task
