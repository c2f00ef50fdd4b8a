"""What the batch handles: jobs, and the stepper that it drives for them. No policy and no array is here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.durability import Continuation
    from engine.contracts.events import GenerationEvent, GenerationStarted, TokensGenerated
    from engine.contracts.graph import ResidentGraph
    from engine.contracts.prefix import PrefixUse
    from engine.execution.adapter_mounts import AdapterMounts
    from engine.execution.checkpoints import CheckpointKeeper, DurableRow
    from engine.execution.delivery import Mailbox
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.rows import JobRow
    from engine.execution.scheduler import Limits

PATIENCE_SECONDS: Final = 60.0


class Pending(Protocol):
    """A step that was started and not read yet."""

    def may_follow(self, row: Any) -> bool:
        """Whether `row` may take part in the next step before this one is read."""

    def read(self) -> Sequence[Any]:
        """Wait; for each row what it receives, None while nothing is due, or the `RowFault` that ends it."""


class BoundMethod(Protocol):
    """The part of a stepper's work that depends on the model's method. Every call comes from the engine thread."""

    @property
    def graph(self) -> ResidentGraph:
        """The graph."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, of adapters over them, and of what the method has made of them for all rows."""

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""

    def dispatch(self, rows: Sequence[Any], after: Any) -> Pending:
        """Start a step, as `Stepper.dispatch`."""

    def works(self) -> bool:
        """Compute a little on a state of its own; whether the numbers are finite. Raises when the device is broken."""

    def close(self) -> None:
        """Release the graph, and what was made of its weights; nothing may be asked any more."""


class Stepper(Protocol):
    """What the batch drives once a model is resident. Every call comes from the engine thread."""

    @property
    def limits(self) -> Limits:
        """What may be held and done at once."""

    @property
    def prefixes(self) -> PrefixKeeper:
        """States that rows can begin with."""

    @property
    def adapters(self) -> AdapterMounts | None:
        """Where adapters are taken on and off; None where the graph takes none."""

    @property
    def held_bytes(self) -> int:
        """What the model holds, rows apart."""

    @property
    def checkpoints(self) -> CheckpointKeeper:
        """States from which rows can be continued after a crash."""

    def make_caches(self) -> list[Cache]:
        """Fresh state for one row."""

    def dispatch(self, rows: Sequence[Any], after: Any) -> Pending:
        """Start a step that advances `rows` by one unit each; those also in `after` must be allowed to follow it."""

    def ended(self) -> None:
        """A generation has ended, on whatever path; never raises."""

    def probe(self) -> None:
        """Run a small generation of its own; raises when the device no longer works."""

    def resume(self) -> None:
        """Work begins after a time without any."""

    def rest(self) -> None:
        """No work is left for now: give back what is held for speed only."""

    def close(self) -> None:
        """Release the model."""


class RowBrokenError(Exception):
    """The row of `job` failed when the scheduler asked it something; the batch ends it, and nobody else hears of it."""

    def __init__(self, job: Job) -> None:
        super().__init__("a row cannot tell where it stands")
        self.job = job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One accepted generation on its way through the engine; the scheduler sees it as `Schedulable`.

    `submitted_at` is a time of the engine's clock; from then on its caller has `deadline_seconds` (None: for ever), and
    it may wait `max_queue_seconds` for a row (None: for ever).
    `predicted_bytes` and `context_tokens` are of the row at its longest, `unit_tokens` of its widest unit. A row that
    continues a generation has `replayed` its tokens, which are told once it is admitted.
    """

    row: JobRow
    mailbox: Mailbox
    started: GenerationStarted
    caller: str = ""
    priority: int = 0
    submitted_at: float = 0.0
    deadline_seconds: float | None = None
    max_queue_seconds: float | None = None
    predicted_bytes: int = 0
    context_tokens: int = 1
    unit_tokens: int = 1
    prefix: PrefixUse | None = None
    durable: DurableRow | None = None
    continuation: Continuation | None = None
    replayed: TokensGenerated | None = None

    @property
    def due_at(self) -> float:
        """When its turn ends: at its deadline, or when it has waited long, lest a flow of hasty calls starve it."""
        left_seconds = math.inf if self.deadline_seconds is None else self.deadline_seconds
        return self.submitted_at + min(PATIENCE_SECONDS, left_seconds)

    def waits_too_long(self, now: float) -> bool:
        """Whether it has waited for a row for as long as it may."""
        return self.max_queue_seconds is not None and now - self.submitted_at >= self.max_queue_seconds

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain.

        Raises:
            RowBrokenError: the row failed; here and below.
        """
        try:
            return self.row.is_prefilling
        except Exception as fault:
            raise RowBrokenError(self) from fault

    @property
    def unfed_tokens(self) -> int:
        """Prompt tokens that remain."""
        try:
            return self.row.unfed_tokens
        except Exception as fault:
            raise RowBrokenError(self) from fault

    def next_width(self, limit_tokens: int) -> int:
        """Tokens of the next unit."""
        try:
            return self.row.next_width(limit_tokens)
        except Exception as fault:
            raise RowBrokenError(self) from fault

    def first_events(self) -> list[GenerationEvent]:
        """What the caller is told once it is known with how much of its prompt the row begins."""
        cached_tokens = self.row.cached_tokens
        started = replace(self.started, cached_tokens=cached_tokens) if cached_tokens else self.started
        return [started, *([] if self.replayed is None else [self.replayed])]
