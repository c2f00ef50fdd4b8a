"""The continuous batch: all jobs of one engine, and one round of their work. Runs on the engine thread alone.

A round drops who was aborted, admits who may run, starts the next step, and only then reads the one before: the device
is not kept waiting for the host. After a failed step rows go one by one until the guilty one is found. Every other call
into a row goes through `_alone`, where a fault ends this row and nobody else, or through `spared`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from engine.contracts.errors import EngineFailedError, GenerationFailedError, QueueTimeError
from engine.contracts.events import TokensGenerated
from engine.execution.isolation import failed_end, new_correlation_id, spared
from engine.execution.job import Job, RowBrokenError
from engine.execution.scheduler import Scheduler
from engine.generation.row import RowFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.errors import EngineError
    from engine.contracts.events import GenerationEvent
    from engine.execution.delivery import Mailbox
    from engine.execution.job import Pending, Stepper
    from engine.execution.scheduler import Limits
    from engine.execution.tally import StepTally

logger = logging.getLogger(__name__)

STEP_SECONDS_DECAY: Final = 0.95
QUEUE_RETRY_SECONDS: Final = 1.0

P = ParamSpec("P")
T = TypeVar("T")

Told = list[tuple["Mailbox", "GenerationEvent"]]


@dataclass(frozen=True, slots=True)
class _Step:
    """A started step; `targets` holds for each job the position that it brings its state to."""

    pending: Pending
    targets: dict[Job, int]


class Batch:
    """Jobs waiting and running over one stepper."""

    def __init__(
        self, stepper: Stepper, clock: Callable[[], float], tell: Callable[[Told], None], tally: StepTally
    ) -> None:
        """Start empty; `clock` counts seconds, `tell` takes what callers are to hear, in order."""
        self._stepper = stepper
        self._tally = tally
        self._clock = clock
        self._tell = tell
        self._prefixes = stepper.prefixes
        self._checkpoints = stepper.checkpoints
        self._jobs = Scheduler[Job](stepper.limits)
        self._step: _Step | None = None
        self._suspects: dict[Job, int] = {}
        self._left: list[Job] = []
        self._failed_together: frozenset[Job] = frozenset()
        self.step_seconds = 0.0

    def __len__(self) -> int:
        """Jobs waiting or running."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Every job."""
        return iter(self._jobs)

    @property
    def stepper(self) -> Stepper:
        """What drives the rows."""
        return self._stepper

    @property
    def limits(self) -> Limits:
        """What may be held and done at once."""
        return self._jobs.limits

    @property
    def running(self) -> int:
        """Jobs that hold a row."""
        return len(self._jobs.running)

    def beyond_room(self, arriving: Sequence[Job]) -> int:
        """How many of those who wait, and of the `arriving`, find no free row or no memory. From any thread."""
        return self._jobs.beyond_room(arriving)

    @property
    def held_bytes(self) -> int:
        """Memory promised to the rows that run."""
        return self._jobs.limits.state_bytes - self._jobs.room_bytes

    def uses_adapter(self, adapter_id: str) -> bool:
        """Whether a job, waiting or running, takes the adapter."""
        return any(one.id == adapter_id for job in self for one in job.row.options.adapters)

    def widen(self, more_bytes: int) -> None:
        """Let rows hold so much more; a negative number takes away from what nobody holds yet."""
        self._jobs.limits = replace(self._jobs.limits, state_bytes=max(0, self._jobs.limits.state_bytes + more_bytes))

    def submit(self, job: Job) -> None:
        """Put a job into the queue."""
        self._jobs.submit(job)

    def advance(self) -> None:
        """One round. Who was aborted or admitted is told before the wait for the device.

        Raises:
            EngineFailedError: the device no longer works; every job is still here.
        """
        started = self._clock()
        try:
            self._step_on()
        finally:
            self._keep_states()
        self.step_seconds = max(self._clock() - started, STEP_SECONDS_DECAY * self.step_seconds)

    def _step_on(self) -> None:
        self._tell([*self._drop_aborted(), *self._drop_overdue()])
        self._keep_prompts_given_up()
        self._tell(self._admit())
        before, self._step = self._step, None
        failed = self._start_next(before)
        if before is not None:
            told, unread = self._finish(before)
            self._tell(told)
            failed = unread or failed  # what followed a failed step never had a chance: one incident, one trial
        if failed is not None:
            self._tell(self._isolate(failed))

    def settle(self) -> None:
        """Wait for a step that nobody needs any more, so that nothing runs while the engine rests."""
        if self._step is not None:
            step, self._step = self._step, None
            try:
                step.pending.read()
            except Exception:
                logger.exception("a step failed after all of its rows had left")

    def close(self) -> None:
        """Let go of every row's state, then of the model."""
        self.settle()
        for job in self._jobs:
            spared(None, job.row.close)
            self._stepper.ended()
        self._stepper.close()

    def _alone(self, job: Job, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """What `work`, which is about this row alone, gives; None if it failed: the row has ended then, and is told."""
        try:
            return work(*arguments, **named)
        except Exception:
            self._end_alone(job)
            return None

    def _end_alone(self, job: Job) -> None:
        """End a row for the fault that is being handled."""
        correlation_id = new_correlation_id()
        logger.exception("a row failed (correlation id %s)", correlation_id)
        self._tell(self._fail(job, GenerationFailedError(correlation_id)))

    def _drop_aborted(self) -> Told:
        aborted = [job for job in self._jobs if job.row.signal.aborted]
        return [event for job in aborted for event in self._alone(job, self._abort, job) or ()]

    def _abort(self, job: Job) -> Told:
        text, finished = job.row.aborted()
        self._leave(job, keep=job not in self._suspects)
        is_final = job.durable is None  # what is held back may still become part of a stop when the row goes on
        return _events(job, [TokensGenerated((), text)] if text and is_final else [], finished)

    def _drop_overdue(self) -> Told:
        """Refuse whoever has waited for a row as long as anybody may."""
        now = self._clock()
        told: Told = []
        for job in [job for job in self._jobs.waiting if job.waits_too_long(now)]:
            limit_seconds = job.max_queue_seconds or 0.0
            told += self._fail(
                job, QueueTimeError(limit_seconds=limit_seconds, retry_after_seconds=QUEUE_RETRY_SECONDS)
            )
        return told

    def _admit(self) -> Told:
        told: Told = []
        try:
            self._jobs.admit(lambda job: self._begin(job, told), self._may_begin)
        except RowBrokenError as fault:
            self._end_alone(fault.job)
        self._prefixes.make_room(self._jobs.room_bytes)
        return told

    def _may_begin(self, job: Job) -> bool:
        """Whether `job` gains nothing by waiting for a prompt of no less priority."""
        if job.continuation is not None:
            return True
        others = ((other.row, other.prefix) for other in self._jobs.running if other.priority >= job.priority)
        return not spared(False, self._prefixes.awaits, job.row, job.prefix, others)

    def _begin(self, job: Job, told: Told) -> bool:
        """Open the row of `job`; whether it could be.

        Raises:
            EngineFailedError: it could not, since the device no longer works.
        """
        events = self._alone(job, self._open, job)
        if events is None:
            self._require_working_device(new_correlation_id())
            return False
        told += _events(job, events, None)
        return True

    def _open(self, job: Job) -> list[GenerationEvent]:
        caches, cached_tokens = self._first_state(job)
        try:
            stops = spared(False, self._prefixes.stops, job.row, job.prefix, cached_tokens)
            job.row.admit(caches, cached_tokens, joins_tail=not stops)
        finally:
            if job.row.caches is not caches:  # the row has not come to own them
                for cache in caches:
                    spared(None, cache.close)
        return job.first_events()

    def _first_state(self, job: Job) -> tuple[list[Cache], int]:
        """Caches that hold the first of what is known, and how many tokens that is."""
        if job.continuation is None:
            warm = spared(None, self._prefixes.begin, job.row, job.prefix, self._jobs.room_bytes)
        else:
            warm = spared(None, self._checkpoints.begin, job.continuation)
        return (self._stepper.make_caches(), 0) if warm is None else warm

    def _start_next(self, before: _Step | None) -> dict[Job, int] | None:
        """Start the next step beside `before`; returns the targets of a step that could not even be started."""
        targets: dict[Job, int] = {}
        tokens = prompt_tokens = 0
        for job, width in self._plan(before):
            target = self._alone(job, self._narrowed, job, width)
            if target is not None:
                targets[job] = target[0]
                tokens += width
                prompt_tokens += width if target[1] else 0
        if not targets:
            return None
        try:
            rows = [job.row for job in targets]
            pending = self._stepper.dispatch(rows, None if before is None else before.pending)
        except Exception:
            return self._noted(targets)
        self._step = _Step(pending, targets)
        self._tally.started(tokens=tokens, prompt_tokens=prompt_tokens)
        return None

    @staticmethod
    def _narrowed(job: Job, width: int) -> tuple[int, bool]:
        """Give the row its width; the position that it comes to, and whether that is by tokens that are known."""
        job.row.limit_next_unit(width)
        return job.row.position + width, job.is_prefilling

    def _plan(self, before: _Step | None) -> list[tuple[Job, int]]:
        """Jobs of the next step and their widths. Who cannot tell what it needs has ended, and the others go on."""
        while True:
            try:
                return self._next_parts(before)
            except RowBrokenError as fault:
                self._end_alone(fault.job)

    def _next_parts(self, before: _Step | None) -> list[tuple[Job, int]]:
        """What the scheduler plans; but after a failed step each suspect goes alone until it is cleared."""
        if self._suspects:
            suspect = next(iter(self._suspects))
            width = suspect.next_width(self._jobs.limits.prefill_step_tokens)
            return [] if before is not None else [(suspect, width)]
        if before is None:
            return self._jobs.plan()
        may_follow = before.pending.may_follow
        return self._jobs.plan(lambda job: self._alone(job, may_follow, job.row) or False)

    def _finish(self, step: _Step) -> tuple[Told, dict[Job, int] | None]:
        """Read `step` and commit its tokens, but for those of jobs that have left; or the targets of a failed one."""
        try:
            drawn = step.pending.read()
        except Exception:
            self._step = None
            return [], self._noted(step.targets)
        if len(step.targets) > 1:
            self._failed_together = frozenset()
        self._suspects = {job: target for job, target in [*self._suspects.items()] if self._is_behind(job, target)}
        alive = set(self._jobs.running)
        told = [
            event
            for job, part in zip(step.targets, drawn, strict=True)
            if job in alive
            for event in self._alone(job, self._commit, job, part) or ()
        ]
        return told, None

    def _is_behind(self, job: Job, target: int) -> bool:
        return self._alone(job, lambda: job.row.position < target) or False

    def _commit(self, job: Job, drawn: Any) -> Told:
        """Let one row receive its part."""
        row = job.row
        if isinstance(drawn, RowFault):
            correlation_id = new_correlation_id()
            logger.error("a row has no token: %s (correlation id %s)", drawn.reason, correlation_id)
            return self._fail(job, GenerationFailedError(correlation_id))
        before = row.next_index
        events, finished = row.receive(drawn)
        self._tally.generated_tokens += row.next_index - before
        if drawn is not None:
            spared(None, self._prefixes.confirm, row, self._jobs.room_bytes)
        if finished is None:
            spared(None, self._checkpoints.confirm, job.durable)
        else:
            spared(None, self._checkpoints.finish, job.durable)
            self._leave(job, keep=True)
        return _events(job, events, finished)

    def _noted(self, targets: dict[Job, int]) -> dict[Job, int]:
        logger.exception("a step of %d row(s) failed", len(targets))
        return targets

    def _isolate(self, targets: dict[Job, int]) -> Told:
        """Go on after a failed step: its rows are tried alone, and one that fails alone again has to end.

        No state survives, since rows may share storage: every row's is rebuilt from its ids.
        """
        correlation_id = new_correlation_id()
        logger.error("the failed step has the correlation id %s", correlation_id)
        self._require_working_device(correlation_id)
        running = set(self._jobs.running)
        suspects = {job: target for job, target in targets.items() if job in running}
        guilty = self._guilty(targets, suspects)
        self._suspects = suspects if len(targets) > 1 else {**suspects, **self._suspects}
        told = [] if guilty is None else self._fail(guilty, GenerationFailedError(correlation_id))
        for job in self._jobs.running:
            spared(None, self._prefixes.forget, job.row)
            spared(None, self._checkpoints.distrust, job.durable)
            self._alone(job, lambda row: row.restart(self._stepper.make_caches()), job.row)
        return told

    def _guilty(self, targets: dict[Job, int], suspects: dict[Job, int]) -> Job | None:
        """The suspect that failed alone, or the newest of rows that have passed alone and failed together again."""
        if len(targets) == 1:
            return next((job for job in suspects if job in self._suspects), None)
        again = len(self._failed_together & suspects.keys()) > 1
        self._failed_together = frozenset() if again else frozenset(suspects)
        return next((job for job in reversed(self._jobs.running) if job in suspects), None) if again else None

    def _require_working_device(self, correlation_id: str) -> None:
        try:
            self._stepper.probe()
        except Exception:
            logger.exception("the device does not work any more (correlation id %s)", correlation_id)
            raise EngineFailedError(correlation_id) from None

    def _fail(self, job: Job, error: EngineError) -> Told:
        finished = failed_end(job.row, error)
        self._leave(job, keep=False)
        return _events(job, [], finished)

    def _leave(self, job: Job, *, keep: bool) -> None:
        """Take `job` out. A state that may be worth keeping is let go of at the end of the round."""
        self._jobs.remove(job)
        self._suspects.pop(job, None)
        if keep and job.prefix is not None and job.row.caches:
            self._left.append(job)
        else:
            self._let_go(job)

    def _keep_states(self) -> None:
        """Keep states of rows that have ended or read their prompt, and take checkpoints of those that go on.

        It waits for the step in hand, so it comes when everybody has been told of the one before.
        """
        self._keep(self._left)
        for job in () if self._step is None else self._step.targets:
            spared(None, self._prefixes.watch, job.row, job.prefix)
            spared(None, self._checkpoints.watch, job.durable)

    def _keep_prompts_given_up(self) -> None:
        """Keep what was read of them before those who waited for it are admitted.

        It waits for the step in hand too, and so only if somebody may be waiting.
        """
        if len(self._jobs.waiting):
            self._keep([job for job in self._left if spared(False, _has_no_token, job)])

    def _keep(self, jobs: Sequence[Job]) -> None:
        self._left = [job for job in self._left if job not in jobs]
        for job in jobs:
            spared(None, self._prefixes.keep, job.row, job.prefix, self._jobs.room_bytes)
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        spared(None, self._prefixes.forget, job.row)
        spared(None, self._checkpoints.forget, job.durable)
        spared(None, job.row.close)
        self._stepper.ended()


def _events(job: Job, events: Sequence[GenerationEvent], finished: GenerationEvent | None) -> Told:
    return [(job.mailbox, event) for event in (*events, *([finished] if finished is not None else []))]


def _has_no_token(job: Job) -> bool:
    return not job.row.next_index
