"""From an accepted request to the job that the engine thread gets, and, of a generation that goes on, what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.contracts.durability import DurableUse
from engine.contracts.events import TokensGenerated
from engine.execution.accepting import DurableAcceptance
from engine.execution.checkpoints import DurableRow
from engine.execution.job import Job

if TYPE_CHECKING:
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.durability import Continuation, DurableFolder
    from engine.contracts.events import GenerationFinished, GenerationRequest
    from engine.execution.accepting import Acceptance
    from engine.execution.delivery import Mailbox
    from engine.execution.rows import JobRow
    from engine.generation.row import Row

NOT_KEPT: Final = "the disk takes no checkpoints: the generation is not durable"


def opened_job(
    request: GenerationRequest,
    acceptance: Acceptance,
    *,
    signal: AbortSignal,
    mailbox: Mailbox,
    folder: DurableFolder | None,
    continuation: Continuation | None,
    max_queue_seconds: float | None,
) -> tuple[Job, GenerationFinished | None]:
    """The job, and the end of a generation whose known tokens have brought it already."""
    started = acceptance.started()
    durable: DurableRow | None = None
    replayed: TokensGenerated | None = None
    finished: GenerationFinished | None = None
    row: Row | None = None
    if isinstance(acceptance, DurableAcceptance):
        row = acceptance.autoregressive_row(signal)
        durable = _durable(row, acceptance, folder)
        kept = {"checkpoint": True} if durable is not None else {"reasons": (*started.execution.reasons, NOT_KEPT)}
        started = replace(started, execution=replace(started.execution, **kept))
        if continuation is not None:
            continuation = _within(continuation, row.prompt_tokens + len(continuation.generated))
            shown, text, finished = row.replay(continuation.generated)
            replayed = TokensGenerated(tuple(shown), text)
            started = replace(started, resumed_tokens=len(shown))
    job_row: JobRow = acceptance.open_row(signal) if row is None else row
    job = Job(
        row=job_row,
        mailbox=mailbox,
        started=started,
        caller=request.caller,
        priority=request.priority,
        submitted_at=acceptance.submitted_at,
        deadline_seconds=request.deadline_seconds,
        max_queue_seconds=max_queue_seconds,
        predicted_bytes=acceptance.state_bytes,
        context_tokens=acceptance.context_tokens,
        unit_tokens=acceptance.unit_tokens,
        prefix=acceptance.prefix,
        durable=durable,
        continuation=continuation,
        replayed=replayed,
    )
    return job, finished


def _within(continuation: Continuation, known_tokens: int) -> Continuation:
    """Without a state that covers more than is known but for the newest token: it is rebuilt from the ids then."""
    if continuation.state is None or continuation.state.tokens < known_tokens:
        return continuation
    return replace(continuation, state=None)


def _durable(row: Row, acceptance: DurableAcceptance, folder: DurableFolder | None) -> DurableRow | None:
    if folder is None:
        return None
    use = DurableUse(folder=folder, identity=acceptance.identity, every_tokens=acceptance.every_tokens)
    return DurableRow(row=row, use=use)
