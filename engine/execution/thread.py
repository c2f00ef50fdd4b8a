"""The engine thread: owns mlx, takes commands between steps, steps rows, and reports each step once.

It holds a short lock only to exchange commands, never across a step. Clock values are seconds.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.contracts.errors import (
    EngineError,
    EngineFailedError,
    GenerationFailedError,
    OverloadedError,
    UnavailableError,
)
from engine.contracts.events import TokensGenerated
from engine.contracts.results import FinishReason
from engine.execution.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.events import GenerationEvent, GenerationStarted
    from engine.execution.delivery import Dispatcher, Mailbox
    from engine.generation.row import Row

logger = logging.getLogger(__name__)

UNEXPLAINED_LIMIT = 2
"""Failures of a step whose rows all pass alone, before one of them has to go: together they are too much."""

STEP_SECONDS_DECAY = 0.95

QUEUE_RETRY_SECONDS = 1.0


class Stepper(Protocol):
    """What the thread drives once a model is resident. Every call comes from the engine thread."""

    @property
    def limits(self) -> Limits:
        """What may be held and done at once."""

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""

    def step(self, rows: Sequence[Row]) -> list[int | None]:
        """Advance `rows` by one unit each; the sampled token of each, or None."""

    def resume(self) -> None:
        """Work begins after a time without any."""

    def probe(self) -> None:
        """Run a small generation of its own; raises when the device no longer works."""

    def rest(self) -> None:
        """No work is left for now: give back what is held for speed only."""

    def close(self) -> None:
        """Release the model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One accepted generation on its way through the engine; the scheduler sees it as `Schedulable`."""

    row: Row
    mailbox: Mailbox
    started: GenerationStarted
    caller: str = ""
    priority: int = 0
    predicted_bytes: int = 0

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain."""
        return self.row.is_prefilling

    @property
    def unfed_tokens(self) -> int:
        """Prompt tokens that remain."""
        return self.row.unfed_tokens

    def next_width(self, limit_tokens: int) -> int:
        """Tokens of the next unit."""
        return self.row.next_width(limit_tokens)


class EngineThread:
    """Runs the loop. `submit` and `stop` may be called from any thread; abort signals are read between steps."""

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
        self._jobs = Scheduler[Job](Limits(max_rows=0, prefill_step_tokens=1, mixed_prefill_tokens=1, state_bytes=0))
        self._max_rows = 0
        self._suspects: dict[Job, int] = {}
        self._unexplained = 0
        self.step_seconds = 0.0
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
            queued = len(self._incoming) + len(self._jobs) - self._max_rows
            if queued >= self._max_queue:
                raise OverloadedError(
                    "the queue", limit=self._max_queue, used=queued, retry_after_seconds=QUEUE_RETRY_SECONDS
                )
            self._incoming.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Ask the thread to end after the step in hand. Rows that still run must have been aborted before."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join()

    def stalled_seconds(self) -> float:
        """How long the step in hand has taken; 0 when idle. Read without a lock: the value is one attribute."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else max(0.0, self._clock() - busy_since)

    def _run(self) -> None:
        fault: EngineError | None = None
        try:
            stepper = self._load()
            self._jobs = Scheduler(stepper.limits)
            self._max_rows = stepper.limits.max_rows
            try:
                while self._turn(stepper):
                    pass
            finally:
                self._release()
                stepper.close()
        except EngineError as error:
            fault = error
        except BaseException:
            correlation_id = _correlation_id()
            logger.exception("the engine thread died (correlation id %s)", correlation_id)
            fault = EngineFailedError(correlation_id)
        self._end(fault)

    def _end(self, fault: EngineError | None) -> None:
        """Refuse what comes, and end everything that is still here: nobody may wait for a thread that is gone."""
        with self._changed:
            self._ended = True
            jobs = [*self._jobs, *self._incoming]
            self._incoming.clear()
        self._busy_since = None
        error = fault or UnavailableError("stopped", "the service is shutting down")
        self._dispatcher.deliver([(job.mailbox, job.row.finished(FinishReason.ERROR, error=error)) for job in jobs])
        self._dispatcher.call(self._on_end, fault)

    def _turn(self, stepper: Stepper) -> bool:
        """One round: take commands, drop aborted rows, admit, step. Returns False when it is time to end."""
        if not self._take_commands(stepper):
            return False
        self._dispatcher.deliver([*self._drop_aborted(), *self._admit(stepper)])
        plan = self._plan()
        if plan:
            self._dispatcher.deliver(self._step(stepper, plan))
        return True

    def _take_commands(self, stepper: Stepper) -> bool:
        if not len(self._jobs):
            self._sleep_until_work(stepper)
        self._busy_since = self._clock()
        with self._changed:
            for job in self._incoming:
                self._jobs.submit(job)
            self._incoming.clear()
            return bool(len(self._jobs) or not self._stopping)

    def _sleep_until_work(self, stepper: Stepper) -> None:
        with self._changed:
            if self._incoming or self._stopping:
                return
        stepper.rest()
        self._busy_since = None
        with self._changed:
            self._changed.wait_for(lambda: self._incoming or self._stopping)
        stepper.resume()

    def _drop_aborted(self) -> list[tuple[Mailbox, GenerationEvent]]:
        events: list[tuple[Mailbox, GenerationEvent]] = []
        for job in [job for job in self._jobs if job.row.signal.aborted]:
            text, finished = job.row.aborted()
            self._remove(job)
            events += _told(job, [TokensGenerated((), text)] if text else [], finished)
        return events

    def _admit(self, stepper: Stepper) -> list[tuple[Mailbox, GenerationEvent]]:
        admitted = self._jobs.admit()
        for job in admitted:
            job.row.admit(stepper.make_caches())
        return [(job.mailbox, job.started) for job in admitted]

    def _plan(self) -> list[tuple[Job, int]]:
        """Jobs of the next step and their widths; after a failed step each suspect goes alone until it is cleared."""
        if not self._suspects:
            return self._jobs.plan()
        suspect = next(iter(self._suspects))
        return [(suspect, suspect.row.next_width(self._jobs.limits.prefill_step_tokens))]

    def _step(self, stepper: Stepper, plan: Sequence[tuple[Job, int]]) -> list[tuple[Mailbox, GenerationEvent]]:
        jobs = [job for job, _ in plan]
        targets = {job: job.row.position + width for job, width in plan}
        for job, width in plan:
            job.row.limit_next_unit(width)
        started = self._clock()
        try:
            drawn = stepper.step([job.row for job in jobs])
        except Exception:
            return self._failed_step(stepper, targets)
        self.step_seconds = max(self._clock() - started, STEP_SECONDS_DECAY * self.step_seconds)
        if len(jobs) > 1:
            self._unexplained = 0
        self._clear_suspects()
        return [event for job, token in zip(jobs, drawn, strict=True) for event in self._advance(job, token)]

    def _clear_suspects(self) -> None:
        """A suspect that has passed, alone, the unit with which it failed is innocent."""
        self._suspects = {job: target for job, target in self._suspects.items() if job.row.position < target}

    def _failed_step(self, stepper: Stepper, targets: dict[Job, int]) -> list[tuple[Mailbox, GenerationEvent]]:
        """A row that fails alone is guilty and ends; rows that failed together are tried one by one.

        No state survives a failed step, since rows may share storage: every row's is rebuilt from its ids. `targets`
        holds for each job the position that the step would have brought it to.
        """
        correlation_id = _correlation_id()
        logger.exception("a step of %d rows failed (correlation id %s)", len(targets), correlation_id)
        try:
            stepper.probe()
        except Exception:
            logger.exception("the device does not work any more (correlation id %s)", correlation_id)
            raise EngineFailedError(correlation_id) from None
        guilty = next(iter(targets)) if len(targets) == 1 else self._one_too_many(targets)
        events: list[tuple[Mailbox, GenerationEvent]] = []
        if guilty is not None:
            events = self._fail(guilty, GenerationFailedError(correlation_id))
        for job in self._jobs.running:
            job.row.restart(stepper.make_caches())
        if len(targets) > 1:
            self._suspects = {job: target for job, target in targets.items() if job is not guilty}
        return events

    def _one_too_many(self, targets: dict[Job, int]) -> Job | None:
        """The newest row, when rows that pass alone have failed together again."""
        self._unexplained += 1
        if self._unexplained < UNEXPLAINED_LIMIT:
            return None
        self._unexplained = 0
        return next(job for job in reversed(self._jobs.running) if job in targets)

    def _advance(self, job: Job, token: int | None) -> list[tuple[Mailbox, GenerationEvent]]:
        """Commit one row's token; a fault in its text or stop rules ends this row alone."""
        row = job.row
        if token is None:
            progress = row.new_progress()
            return [] if progress is None else [(job.mailbox, progress)]
        try:
            shown, text, finished = row.commit(token)
        except Exception:
            correlation_id = _correlation_id()
            logger.exception("a row failed to commit its token (correlation id %s)", correlation_id)
            return self._fail(job, GenerationFailedError(correlation_id))
        events: list[GenerationEvent] = []
        if shown is not None or text:
            events.append(TokensGenerated(() if shown is None else (shown,), text))
        if finished is None:
            return _told(job, events)
        self._remove(job)
        return _told(job, events, finished)

    def _fail(self, job: Job, error: EngineError) -> list[tuple[Mailbox, GenerationEvent]]:
        finished = job.row.finished(FinishReason.ERROR, error=error)
        self._remove(job)
        return _told(job, [], finished)

    def _remove(self, job: Job) -> None:
        self._jobs.remove(job)
        self._suspects.pop(job, None)
        job.row.close()

    def _release(self) -> None:
        for job in self._jobs:
            job.row.close()


def _told(
    job: Job, events: Sequence[GenerationEvent], finished: GenerationEvent | None = None
) -> list[tuple[Mailbox, GenerationEvent]]:
    return [(job.mailbox, event) for event in (*events, *([finished] if finished is not None else []))]


def _correlation_id() -> str:
    return uuid.uuid4().hex[:12]
