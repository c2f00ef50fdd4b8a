"""Who waits, who runs, and who takes part in the next step: a pure policy. Units: tokens and bytes.

Admission: higher priority first, then the caller with the fewest running rows, then whose time ends first, then order
of arrival; a head that does not fit into memory yet blocks, so that nobody overtakes it for ever. Prefill: each prompt
has a turn, the work that had been served when it came plus its own length, and the earliest turn goes first. A short
prompt so passes a long one at once, equals keep their order, and nobody's turn can be put off. Where rows are computed
one at a time, they take turns in a circle instead, whatever they do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Schedulable(Protocol):
    """What the policy sees of a generation."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def caller(self) -> str:
        """Whose it is."""

    @property
    def due_at(self) -> float:
        """When its turn ends at the latest, on any clock that all share; nobody's may lie infinitely far off."""

    @property
    def predicted_bytes(self) -> int:
        """State that it will hold at its longest."""

    @property
    def context_tokens(self) -> int:
        """Its length at its longest."""

    @property
    def unit_tokens(self) -> int:
        """The widest unit of its work."""

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain."""

    @property
    def unfed_tokens(self) -> int:
        """Prompt tokens that remain."""

    def next_width(self, limit_tokens: int) -> int:
        """Tokens of its next unit when `limit_tokens` may be spent; more than the limit if its chunk is exact."""


JobT = TypeVar("JobT", bound=Schedulable)


class WorkspaceBytes(Protocol):
    """Predicts the workspace of a step."""

    def __call__(self, *, step_tokens: int, context_tokens: int) -> int:
        """Bytes that a step of `step_tokens` needs for rows that become `context_tokens` long."""


def no_workspace(*, step_tokens: int, context_tokens: int) -> int:  # noqa: ARG001 - the Protocol's parameters
    """For bounds that count states alone."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine may hold and do at once.

    `prefill_step_tokens` bounds the prompt tokens of a step, and `prefill_chunk_tokens` those of one prompt in it.
    Where somebody decodes, so does `mixed_prefill_tokens` for each prompt that is being read, or `mixed_row_tokens` for
    each row that decodes, whichever is more; unless several prompts wait of which the step can finish the first.
    `state_bytes` bounds the predicted state of all running rows, with the `workspace_bytes` of a step of theirs.
    `rows_per_step` is set for graphs that gain nothing by computing rows together; a step then holds no more of them.
    """

    max_rows: int
    prefill_step_tokens: int
    prefill_chunk_tokens: int
    mixed_prefill_tokens: int
    state_bytes: int
    mixed_row_tokens: int = 0
    workspace_bytes: WorkspaceBytes = no_workspace
    rows_per_step: int | None = None


@dataclass(slots=True)
class _Entry(Generic[JobT]):
    job: JobT
    arrival: int
    turn: int = 0
    round: int = 0


class Scheduler(Generic[JobT]):
    """The queue and the rows of one engine. Holds no arrays, no clock and no lock."""

    def __init__(self, limits: Limits) -> None:
        """Start empty."""
        self.limits = limits
        self._waiting: list[_Entry[JobT]] = []
        self._running: list[_Entry[JobT]] = []
        self._arrivals = 0
        self._served_tokens = 0
        self._rounds = 0
        self._held_bytes = 0

    def __len__(self) -> int:
        """Jobs waiting or running."""
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[JobT]:
        """Every job, running ones first."""
        return (entry.job for entry in (*self._running, *self._waiting))

    @property
    def running(self) -> list[JobT]:
        """Jobs that hold a row, in order of admission."""
        return [entry.job for entry in self._running]

    @property
    def waiting(self) -> list[JobT]:
        """Jobs in the queue, in order of arrival."""
        return [entry.job for entry in self._waiting]

    def submit(self, job: JobT) -> None:
        """Put a job into the queue."""
        self._waiting.append(_Entry(job, self._arrivals))
        self._arrivals += 1

    def remove(self, job: JobT) -> None:
        """Forget a job, wherever it stands."""
        self._waiting = [entry for entry in self._waiting if entry.job is not job]
        self._running = [entry for entry in self._running if entry.job is not job]
        self._held_bytes = self._needed_bytes(self.running)

    def beyond_room(self, arriving: Sequence[JobT] = ()) -> int:
        """How many of those who wait, and of the `arriving` after them, find no free row or no memory for it.

        In order of arrival. May be asked from any thread: it is then as it was a moment ago.
        """
        placed, waiting = self.running, [*self.waiting, *arriving]
        for count, job in enumerate(waiting):
            is_full = len(placed) >= self.limits.max_rows
            if is_full or (placed and self._needed_bytes([*placed, job]) > self.limits.state_bytes):
                return len(waiting) - count
            placed.append(job)
        return 0

    @property
    def room_bytes(self) -> int:
        """What those who run, and the one that is about to, leave of the memory for rows."""
        return self.limits.state_bytes - self._held_bytes

    def admit(
        self,
        start: Callable[[JobT], bool] = lambda _job: True,
        may_start: Callable[[JobT], bool] = lambda _job: True,
    ) -> list[JobT]:
        """Move jobs from the queue into rows while rows and memory last.

        `start` opens a row before it has its turn; where it says no, the job has ended and was removed. A job that
        `may_start` denies is passed over, and asked about again next time. Whatever is raised, no job is lost.
        """
        admitted: list[JobT] = []
        passed: list[_Entry[JobT]] = []
        while len(passed) < len(self._waiting) and len(self._running) < self.limits.max_rows:
            entry = self._next_waiting(passed)
            if not may_start(entry.job):
                passed.append(entry)
                continue
            needed_bytes = self._needed_bytes([*self.running, entry.job])
            if self._running and needed_bytes > self.limits.state_bytes:
                break
            self._waiting.remove(entry)
            self._running.append(entry)
            self._held_bytes = needed_bytes
            if start(entry.job):
                entry.turn = self._served_tokens + entry.job.unfed_tokens
                entry.round = self._rounds
                admitted.append(entry.job)
        return admitted

    def plan(self, may_step: Callable[[JobT], bool] = lambda _job: True) -> list[tuple[JobT, int]]:
        """The jobs of the next step and the width of each one's unit: all that decode, then prompts by turn.

        Jobs that `may_step` denies are left out.
        """
        ready = [entry for entry in self._running if may_step(entry.job)]
        if self.limits.rows_per_step is not None:
            return self._plan_circle(ready, self.limits.rows_per_step)
        plan = [(entry.job, 1) for entry in ready if not entry.job.is_prefilling]
        budget = self._prefill_budget()
        spent = 0
        for entry in sorted((e for e in ready if e.job.is_prefilling), key=_by_turn):
            width = entry.job.next_width(max(1, budget - spent))
            if spent and spent + width > budget:
                break
            plan.append((entry.job, width))
            spent += width
        self._served_tokens += spent
        return plan

    def _plan_circle(self, ready: Sequence[_Entry[JobT]], rows: int) -> list[tuple[JobT, int]]:
        """One unit for each of the `rows` that were served longest ago; a new one comes after all the others."""
        chosen = sorted(ready, key=lambda entry: (entry.round, entry.arrival))[:rows]
        for entry in chosen:
            self._rounds += 1
            entry.round = self._rounds
        return [(entry.job, entry.job.next_width(self.limits.prefill_step_tokens)) for entry in chosen]

    def _prefill_budget(self) -> int:
        """Prompt tokens of the next step: beside decoding rows, a share for each prompt that waits for its first token.

        One long prompt so delays running streams little. The share grows with the rows that decode, since a step of
        many rows takes longer anyway. Of a burst, as many prompts are read as a step can finish, and none is begun that
        it cannot: the fewer steps there are, the sooner everybody is done.
        """
        limits, prompts = self.limits, [entry for entry in self._running if entry.job.is_prefilling]
        decoding = len(self._running) - len(prompts)
        if not decoding:
            return limits.prefill_step_tokens
        budget = max(limits.mixed_prefill_tokens * len(prompts), limits.mixed_row_tokens * decoding)
        if len(prompts) > 1:
            budget = max(budget, self._finishable_tokens(prompts))
        return min(limits.prefill_step_tokens, budget)

    def _finishable_tokens(self, prompts: Sequence[_Entry[JobT]]) -> int:
        """Tokens of the earliest prompts that one step can finish."""
        finishable = 0
        for entry in sorted(prompts, key=_by_turn):
            unfed = entry.job.unfed_tokens
            if unfed > self.limits.prefill_chunk_tokens or finishable + unfed > self.limits.prefill_step_tokens:
                break
            finishable += unfed
        return finishable

    def _needed_bytes(self, jobs: Sequence[JobT]) -> int:
        """What `jobs` hold together at their longest, with the workspace of the widest step that they can make."""
        if not jobs:
            return 0
        units = [job.unit_tokens for job in jobs]
        together = sum(sorted(units)[-self.limits.rows_per_step :] if self.limits.rows_per_step else units)
        step_tokens = max(*units, min(self.limits.prefill_step_tokens, together))
        context_tokens = max(job.context_tokens for job in jobs)
        workspace_bytes = self.limits.workspace_bytes(step_tokens=step_tokens, context_tokens=context_tokens)
        return sum(job.predicted_bytes for job in jobs) + workspace_bytes

    def _next_waiting(self, passed: Sequence[_Entry[JobT]]) -> _Entry[JobT]:
        rows_of = Counter(entry.job.caller for entry in self._running)
        left = [entry for entry in self._waiting if entry not in passed]
        return min(left, key=lambda e: (-e.job.priority, rows_of[e.job.caller], e.job.due_at, e.arrival))


def _by_turn(entry: _Entry[JobT]) -> tuple[int, int, int]:
    return -entry.job.priority, entry.turn, entry.arrival
