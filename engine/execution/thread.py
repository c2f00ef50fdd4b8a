"""The engine thread: owns mlx, takes commands between rounds, and reports each round once.

It holds a short lock only to exchange commands, never across a round. Clock values are seconds.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from engine.contracts.errors import EngineError, EngineFailedError, OverloadedError, UnavailableError
from engine.contracts.results import FinishReason
from engine.execution.batch import Batch, new_correlation_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.execution.delivery import Dispatcher
    from engine.execution.job import Job, Stepper

logger = logging.getLogger(__name__)

QUEUE_RETRY_SECONDS = 1.0


class EngineThread:
    """Runs the loop. `submit` and `stop` may be called from any thread; abort signals are read between rounds."""

    def __init__(
        self,
        *,
        load: Callable[[], Stepper],
        dispatcher: Dispatcher,
        on_end: Callable[[EngineError | None], None],
        max_queue: int,
        clock: Callable[[], float],
    ) -> None:
        """`load` runs first, on the thread; `on_end` gets the fault that ended the thread, or None after `stop`."""
        self._load = load
        self._dispatcher = dispatcher
        self._on_end = on_end
        self._max_queue = max_queue
        self._clock = clock
        self._changed = threading.Condition()
        self._incoming: list[Job] = []
        self._stopping = False
        self._ended = False
        self._batch: Batch | None = None
        self._max_rows = 0
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: the thread has ended or is about to.
        """
        with self._changed:
            if self._stopping or self._ended:
                raise UnavailableError("stopped")
            queued = len(self._incoming) + (0 if self._batch is None else len(self._batch)) - self._max_rows
            if queued >= self._max_queue:
                raise OverloadedError(
                    "the queue", limit=self._max_queue, used=queued, retry_after_seconds=QUEUE_RETRY_SECONDS
                )
            self._incoming.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Ask the thread to end after the round in hand. Rows that still run must have been aborted before."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def step_seconds(self) -> float:
        """A recent maximum of the time that a round takes; 0 before the first."""
        return 0.0 if self._batch is None else self._batch.step_seconds

    def stalled_seconds(self) -> float:
        """How long the round in hand has taken; 0 when idle. Read without a lock: the value is one attribute."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else max(0.0, self._clock() - busy_since)

    def _run(self) -> None:
        fault: EngineError | None = None
        try:
            stepper = self._load()
            batch = Batch(stepper, self._clock, self._dispatcher.deliver)
            self._batch, self._max_rows = batch, stepper.limits.max_rows
            try:
                while self._take_commands(batch, stepper):
                    batch.advance()
            finally:
                batch.release()
                stepper.close()
        except EngineError as error:
            fault = error
        except BaseException:
            correlation_id = new_correlation_id()
            logger.exception("the engine thread died (correlation id %s)", correlation_id)
            fault = EngineFailedError(correlation_id)
        self._end(fault)

    def _take_commands(self, batch: Batch, stepper: Stepper) -> bool:
        """Wait for work if there is none, and take it in. Returns False when it is time to end."""
        if not len(batch):
            batch.settle()
            self._sleep_until_work(stepper)
        self._busy_since = self._clock()
        with self._changed:
            for job in self._incoming:
                batch.submit(job)
            self._incoming.clear()
            return bool(len(batch) or not self._stopping)

    def _sleep_until_work(self, stepper: Stepper) -> None:
        with self._changed:
            if self._incoming or self._stopping:
                return
        stepper.rest()
        self._busy_since = None
        with self._changed:
            self._changed.wait_for(lambda: self._incoming or self._stopping)
        stepper.resume()

    def _end(self, fault: EngineError | None) -> None:
        """Refuse what comes, and end everything that is still here: nobody may wait for a thread that is gone."""
        with self._changed:
            self._ended = True
            jobs = [*(self._batch or ()), *self._incoming]
            self._incoming.clear()
        self._busy_since = None
        error = fault or UnavailableError("stopped", "the service is shutting down")
        self._dispatcher.deliver([(job.mailbox, job.row.finished(FinishReason.ERROR, error=error)) for job in jobs])
        self._dispatcher.call(self._on_end, fault)
