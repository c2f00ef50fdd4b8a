"""Keeps durable generations on disk: a worker writes what rows offer, cleans up, and is waited for by nobody.

A row offers a checkpoint and goes on. While one of its checkpoints is being written, or more is waiting than the worker
can take, or the disk has lately failed, rows are told not to take another: a slow disk costs checkpoints, never time.
What cannot be done is told in one line of the log. Units: tokens, bytes and seconds.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.contracts.durability import KeptGeneration
from engine.contracts.errors import NotFoundError, ResumePointGoneError, UnavailableError
from engine.state.disk_worker import DiskWorker
from engine.state.durable_generation import GenerationFolder
from engine.state.durable_root import GENERATION_ID, DurableRoot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.state.durable_root import FolderLock, Found

logger = logging.getLogger(__name__)

QUEUE_BYTES: Final = 256 * 1024**2
"""States that may wait for the worker; beyond that rows take no checkpoint."""
CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for what is queued."""
SWEEP_SECONDS: Final = 60.0
"""How often the worker looks for what is too old or too much, and how far other clocks may be ahead."""
TIDY_SECONDS: Final = 0.1
"""How long the worker removes what is over before it looks after what waits."""
FAILURE_SECONDS: Final = 5.0
"""How long rows take no checkpoint after the disk has failed."""


class DurableDisk:
    """See `engine.contracts.durability.DurableStore`."""

    def __init__(
        self,
        state_folder: Path,
        *,
        capacity_bytes: int,
        max_age_seconds: float,
    ) -> None:
        """Start the worker, which first removes what is too old or too much.

        Args:
            state_folder: the server's own folder; a sub-folder is made when there is something to write.
            capacity_bytes: bytes of all generations; of those that nobody runs, the delivered and the oldest go first.
            max_age_seconds: how long a generation is kept after it was written last, at most.
        """
        self._root = DurableRoot(state_folder)
        self._capacity_bytes = capacity_bytes
        self._max_age_seconds = max_age_seconds
        self._used_bytes = 0
        self._swept_at = time.monotonic()
        self._is_closing = False
        self._failed_at: float | None = None
        self._warned: set[str] = set()
        self._worker = DiskWorker(
            "mlx-stream-checkpoints", idle=self._sweep, idle_seconds=SWEEP_SECONDS, failed=self._failed
        )

    def create(self, generation_id: str, key: str) -> GenerationFolder | None:
        """See `engine.contracts.durability.DurableStore.create`."""
        try:
            lock = self._root.make(generation_id, key)
        except OSError as error:
            self._warn("generations are not durable", error)
            return None
        return GenerationFolder(self, lock, generation_id=generation_id, key=key)

    def open(self, generation_id: str) -> KeptGeneration:
        """See `engine.contracts.durability.DurableStore.open`."""
        if not GENERATION_ID.fullmatch(generation_id):
            raise NotFoundError("generation", generation_id[:64])
        try:
            for found in self._root.found(generation_id=generation_id):
                kept = self._read(found)
                if kept is not None:
                    return kept
                if not self._is_over(found):
                    raise UnavailableError("busy", f"generation {generation_id} runs elsewhere")
                raise ResumePointGoneError(generation_id)
            if self._root.is_marked(generation_id):
                raise ResumePointGoneError(generation_id)
        except OSError as error:
            self._warn("durable generations cannot be read", error)
            raise UnavailableError("unreadable", "what is kept of the generation cannot be read now") from None
        raise NotFoundError("generation", generation_id)

    def find(self, key: str) -> KeptGeneration | None:
        """See `engine.contracts.durability.DurableStore.find`."""
        try:
            awaited = [found for found in self._root.found(key=key) if found.goes_at is None]
            for found in sorted(awaited, key=lambda one: not one.has_checkpoint):
                kept = self._read(found)
                if kept is not None and not kept.was_delivered:
                    return kept
                if kept is not None:
                    kept.folder.release()
        except OSError as error:
            self._warn("durable generations cannot be read", error)
        return None

    def close(self) -> None:
        """See `engine.contracts.durability.DurableStore.close`."""
        self._is_closing = True
        self._worker.close(CLOSE_SECONDS)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until everything is written and removed; returns whether it came to that."""
        return self._worker.wait_idle(seconds)

    def takes_more(self) -> bool:
        """See `engine.state.durable_generation.Disk.takes_more`."""
        failed_at = self._failed_at
        if failed_at is not None and time.monotonic() - failed_at < FAILURE_SECONDS:
            return False
        return self._worker.held_bytes < QUEUE_BYTES

    def submit(self, task: Callable[[], None], nbytes: int = 0) -> None:
        """See `engine.state.durable_generation.Disk.submit`."""
        self._worker.submit(task, nbytes)

    def make_room(self, needed_bytes: int) -> None:
        """See `engine.state.durable_generation.Disk.make_room`."""
        is_due = time.monotonic() - self._swept_at > SWEEP_SECONDS  # a worker that is never idle comes to it here
        if is_due or self._used_bytes + needed_bytes > self._capacity_bytes:
            self._sweep(needed_bytes)
        if self._used_bytes + needed_bytes > self._capacity_bytes:
            raise OSError(errno.EDQUOT, "generations that run take the room")
        self._used_bytes += needed_bytes

    def remove(self, lock: FolderLock, *, leave_mark: bool) -> None:
        """See `engine.state.durable_generation.Disk.remove`."""
        self._root.remove(lock, leave_mark=leave_mark)

    def _read(self, found: Found) -> KeptGeneration | None:
        """What is kept of `found`, locked; None if its time is over, or somebody holds it."""
        if self._is_over(found):
            return None
        try:
            held = self._root.hold(found)
        except FileNotFoundError:
            return None
        if held is None:
            return None
        lock, found = held
        kept = GenerationFolder(self, lock, generation_id=found.generation_id, key=found.key).read_newest()
        return replace(kept, was_delivered=found.goes_at is not None)

    def _is_over(self, found: Found) -> bool:
        """Whether its time is over: that of everything, or that of what was delivered."""
        now = time.time()
        return now - found.written_at > self._max_age_seconds or (found.goes_at is not None and now > found.goes_at)

    def _sweep(self, needed_bytes: int = 0) -> None:
        """Remove what is over, and what is least needed until `needed_bytes` fit too; see `_tidy` for the former."""
        self._swept_at = time.monotonic()
        found = self._root.found()
        self._used_bytes = sum(one.size_bytes for one in found)
        least_needed_first = deque(
            sorted(found, key=lambda one: (not self._is_over(one), one.goes_at is None, one.written_at))
        )
        while least_needed_first and self._used_bytes + needed_bytes > self._capacity_bytes:
            self._remove_unheld(least_needed_first.popleft(), is_too_much=True)
        self._tidy(least_needed_first)

    def _tidy(self, found: deque[Found]) -> None:
        """See to what is over or dated wrongly, for a moment; the rest comes after what else there is to do."""
        until = time.monotonic() + TIDY_SECONDS
        while found:
            one = found.popleft()
            if self._is_over(one):
                self._remove_unheld(one, is_too_much=False)
            elif one.written_at > time.time() + SWEEP_SECONDS:
                self._renew_unheld(one)
            if time.monotonic() >= until:
                break
        if not found:
            self._root.clean(time.time() - self._max_age_seconds)
        elif not self._is_closing:
            self._worker.submit(lambda: self._tidy(found))

    def _remove_unheld(self, found: Found, *, is_too_much: bool) -> None:
        """Remove it if nobody holds it, and it is still over or too much."""
        try:
            held = self._root.hold(found)
            if held is None:
                return
            lock, now = held
            if is_too_much or self._is_over(now):
                self._root.remove(lock, leave_mark=True)
                self._used_bytes -= found.size_bytes
            else:
                lock.unlock()
        except FileNotFoundError:
            self._used_bytes -= found.size_bytes
        except OSError as error:
            self._warn("durable generations cannot be removed", error)

    def _renew_unheld(self, found: Found) -> None:
        """Let the time of what was written in the future begin now: the clock was set back since."""
        with suppress(OSError):
            lock = self._root.lock(found.path)
            if lock is not None:
                try:
                    self._root.renew(lock)
                finally:
                    lock.unlock()

    def _failed(self, error: OSError) -> None:
        self._failed_at = time.monotonic()
        self._warn("checkpoints are not written to disk", error)

    def _warn(self, what: str, error: OSError) -> None:
        """Tell what cannot be done, each thing once."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s (%s); generations go on", what, error.strerror or error)
