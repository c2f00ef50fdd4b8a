"""A row's own fault, where others call into the row: what it costs is that row's alone.

A fault in what a row does ends it (`engine.execution.batch`); one in what is kept of it for others costs what was kept.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from engine.contracts.events import GenerationFinished
from engine.contracts.results import FinishReason, GenerateStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.errors import EngineError
    from engine.execution.rows import JobRow

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def new_correlation_id() -> str:
    """A short id that ties what a caller is told to a line of the log."""
    return uuid.uuid4().hex[:12]


def spared(otherwise: T, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What `work` gives, or `otherwise` if it fails: for what a row can do without."""
    try:
        return work(*arguments, **named)
    except Exception:
        logger.exception("a fault in what is kept of a row; the row goes on without it")
        return otherwise


def failed_end(row: JobRow, error: EngineError) -> GenerationFinished:
    """The end of a row that has failed, without statistics if it cannot tell them any more. Never raises."""
    try:
        return row.finished(FinishReason.ERROR, error=error)
    except Exception:
        logger.exception("a row that has failed cannot tell its statistics")
        return GenerationFinished(finish_reason=FinishReason.ERROR, stats=GenerateStats(), error=error)
