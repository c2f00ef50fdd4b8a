"""The engine thread: owns mlx, takes commands between rounds, and reports each round once.

Models are numbered as they come in, the first one with 0; a replaced one stays until its last row has ended.
It holds a short lock only to exchange commands, never across a round. Clock values are seconds.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from engine.contracts.errors import EngineError, EngineFailedError, OverloadedError, UnavailableError
from engine.contracts.load import EngineLoad
from engine.execution.batch import QUEUE_RETRY_SECONDS, Batch
from engine.execution.errands import Errand, at_once
from engine.execution.isolation import failed_end, new_correlation_id
from engine.execution.tally import StepTally

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from engine.execution.delivery import Dispatcher
    from engine.execution.job import Job, Stepper

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        self._incoming: list[tuple[int, Job]] = []
        self._errands: list[Errand] = []
        self._stopping = False
        self._ended = False
        self.fault: EngineError | None = None
        self._batches: dict[int, Batch] = {}
        self._models = 0
        self._tally = StepTally()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job, to: int = 0) -> None:
        """Queue a job for the model of number `to`.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: the thread has ended or is about to.
        """
        with self._changed:
            if self._stopping or self._ended:
                raise UnavailableError("stopped")
            queued = self._queued()
            if queued >= self._max_queue:
                raise OverloadedError(
                    "the queue", limit=self._max_queue, used=queued, retry_after_seconds=QUEUE_RETRY_SECONDS
                )
            self._incoming.append((to, job))
            self._changed.notify()

    def call(self, work: Callable[[], T], is_due: Callable[[], bool] = at_once) -> Future[T]:
        """Have `work` done between rounds, once `is_due` says so; without rows that run it is done anyway.

        Jobs that were submitted before are taken in first. Errands that are due keep their order.
        """
        errand = Errand(work=work, is_due=is_due)
        with self._changed:
            if not (self._stopping or self._ended):
                self._errands.append(errand)
                self._changed.notify()
                return errand.future
        errand.refuse(UnavailableError("stopped", "the service is shutting down"))
        return errand.future

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

    def load(self) -> EngineLoad:
        """How busy the thread is. Read without a lock: parts may be a round apart."""
        batches, tally = list(self._batches.values()), self._tally
        newest = self._batch
        limits = None if newest is None else newest.limits
        prefixes = [batch.stepper.prefixes for batch in batches]
        running = sum(batch.running for batch in batches)
        return EngineLoad(
            running=running,
            queued=max(0, sum(map(len, batches)) + len(self._incoming) - running),
            row_limit=0 if limits is None else limits.max_rows,
            queue_limit=self._max_queue,
            state_bytes=sum(batch.held_bytes for batch in batches),
            state_limit_bytes=0 if limits is None else limits.state_bytes,
            prefix_entries=sum(keeper.entries for keeper in prefixes),
            prefix_bytes=sum(keeper.nbytes for keeper in prefixes),
            prefix_limit_bytes=sum(keeper.capacity_bytes for keeper in prefixes),
            step_age_seconds=self.stalled_seconds(),
            steps=tally.steps,
            step_tokens=tuple(tally.classes),
            packed_tokens=tally.packed_tokens,
            prefilled_tokens=tally.prefilled_tokens,
            generated_tokens=tally.generated_tokens,
        )

    def add(self, stepper: Stepper) -> int:
        """Take a model in beside those that are there, and return its number. From an errand alone."""
        number = self._models
        self._models += 1
        self._batches[number] = Batch(stepper, self._clock, self._dispatcher.deliver, self._tally)
        return number

    def batch(self, number: int) -> Batch:
        """The rows of one model. From an errand, or to ask whether it is due."""
        return self._batches[number]

    def remove(self, number: int) -> None:
        """Release a model whose rows have ended. From an errand alone."""
        self._rest()  # in the reverse order of coming in: each scope gives back what it found
        try:
            self._batches.pop(number).close()
        finally:
            self._resume()

    def breathe(self) -> None:
        """Give everybody a round from inside a long errand.

        Raises:
            EngineFailedError: the device no longer works.
        """
        self._busy_since = self._clock()
        self._take_jobs()
        self._advance()

    @property
    def _batch(self) -> Batch | None:
        """The rows of the newest model; None before the first and after the last."""
        batches = list(self._batches.values())
        return batches[-1] if batches else None

    def _queued(self) -> int:
        """Jobs for which their own model has no free row, or no memory for one: rows of a replaced one are not ours.

        Who arrives within one round is not counted as waiting for a row that the next round will give.
        """
        arriving: dict[int, list[Job]] = {number: [] for number in self._batches.copy()}
        for number, job in self._incoming:
            arriving.setdefault(number, []).append(job)
        batches = self._batches.copy()
        return sum(
            batches[number].beyond_room(jobs) if number in batches else len(jobs) for number, jobs in arriving.items()
        )

    def _has_jobs(self) -> bool:
        return any(map(len, self._batches.values()))

    def _run(self) -> None:
        fault: EngineError | None = None
        try:
            self.add(self._load())
            try:
                while self._take_commands():
                    self._advance()
            finally:
                with ExitStack() as closing:  # newest first, and all of them
                    for batch in self._batches.values():
                        closing.callback(batch.close)
        except EngineError as error:
            fault = error
        except BaseException:
            correlation_id = new_correlation_id()
            logger.exception("the engine thread died (correlation id %s)", correlation_id)
            fault = EngineFailedError(correlation_id)
        self._end(fault)

    def _advance(self) -> None:
        for batch in list(self._batches.values()):
            if len(batch):
                batch.advance()

    def _take_commands(self) -> bool:
        """Wait for work if there is none, and take it in. Returns False when it is time to end."""
        if not self._has_jobs():
            for batch in self._batches.values():
                batch.settle()
            self._sleep_until_work()
        self._busy_since = self._clock()
        self._take_jobs()
        self._run_errands()
        return self._has_jobs() or not self._stopping

    def _take_jobs(self) -> None:
        with self._changed:
            incoming, self._incoming = self._incoming, []
            for number, job in incoming:
                self._batches[number].submit(job)

    def _run_errands(self) -> None:
        """Those that are due; without rows that run all are, since nothing holds them up."""
        with self._changed:
            errands = list(self._errands)
        for errand in errands:
            if not self._stopping and (errand.is_due() or not self._has_jobs()):
                with self._changed:
                    self._errands.remove(errand)
                errand.run()

    def _sleep_until_work(self) -> None:
        with self._changed:
            if self._incoming or self._errands or self._stopping:
                return
        self._rest()
        self._busy_since = None
        with self._changed:
            self._changed.wait_for(lambda: self._incoming or self._errands or self._stopping)
        self._resume()

    def _rest(self) -> None:
        for batch in reversed(self._batches.values()):
            batch.stepper.rest()

    def _resume(self) -> None:
        for batch in self._batches.values():
            batch.stepper.resume()

    def _end(self, fault: EngineError | None) -> None:
        """Refuse what comes, and end everything that is still here: nobody may wait for a thread that is gone."""
        with self._changed:
            self._ended, self.fault = True, fault
            jobs = [job for batch in self._batches.values() for job in batch]
            jobs += [job for _, job in self._incoming]
            errands, self._errands = self._errands, []
            self._incoming.clear()
        self._busy_since = None
        error = fault or UnavailableError("stopped", "the service is shutting down")
        for errand in errands:
            errand.refuse(error)
        self._dispatcher.deliver([(job.mailbox, failed_end(job.row, error)) for job in jobs])
        self._dispatcher.call(self._on_end, fault)
