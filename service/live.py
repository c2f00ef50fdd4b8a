"""The generations that this process has accepted and not yet seen the end of.

Refuses new ones while draining, writes one log line per end, and tells it to whoever counts. Holds no prompt and no
output.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.contracts.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What is kept of the call that began a generation: what was asked for, and the trace that it belongs to.

    `caller` is the name of its token or certificate, "" without one. `operation` is "chat" or "text_completion";
    `trace` holds the W3C headers of the caller's trace, if it sent any, and `options` what a trace tells of those that
    were set. `looks_up_prefixes`: not `cache.bypass`.
    """

    caller: str = ""
    operation: str = "text_completion"
    trace: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)
    looks_up_prefixes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How many generations have ended by themselves or by their callers, and how many with the service."""

    finished: int = 0
    stopped: int = 0

    def after(self, finished: GenerationFinished) -> Ends:
        """With one more end."""
        if isinstance(finished.error, UnavailableError):
            return replace(self, stopped=self.stopped + 1)
        return replace(self, finished=self.finished + 1)

    def since(self, before: Ends) -> Ends:
        """Those that came after `before`."""
        return Ends(finished=self.finished - before.finished, stopped=self.stopped - before.stopped)


class LiveGenerations:
    """Owner of one watching task per live generation."""

    def __init__(self) -> None:
        """Nothing is live, and new generations are welcome."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = Ends()
        self._draining = False
        self._observers: list[Callable[[Generation, GenerationFinished, CallFacts], None]] = []

    @property
    def is_draining(self) -> bool:
        """Whether new generations are refused."""
        return self._draining

    def observe(self, observer: Callable[[Generation, GenerationFinished, CallFacts], None]) -> None:
        """Have `observer` told of every end."""
        self._observers.append(observer)

    @property
    def count(self) -> int:
        """Generations that have not ended."""
        return len(self._tasks)

    @property
    def ends(self) -> Ends:
        """The ends that have been seen so far."""
        return self._ends

    def require_open(self) -> None:
        """Raise `UnavailableError` once draining has begun. Call right before a generation begins, too."""
        if self._draining:
            raise UnavailableError("draining", "the service is shutting down")

    def watch(self, generation: Generation, facts: CallFacts | None = None) -> None:
        """Follow a generation to its end. Call right after it was accepted, without awaiting in between."""
        task = asyncio.get_running_loop().create_task(self._follow(generation, facts or CallFacts()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drain(self) -> None:
        """Refuse new generations from now on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return when nothing is live."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _follow(self, generation: Generation, facts: CallFacts) -> None:
        finished = await generation.finished()
        self._ends = self._ends.after(finished)
        logger.info("generation finished", extra={"fields": _account(generation, finished, facts)})
        for observer in self._observers:
            observer(generation, finished, facts)


def _account(generation: Generation, finished: GenerationFinished, facts: CallFacts) -> dict[str, object]:
    stats = finished.stats
    return {
        "request_id": generation.request_id,
        "generation_id": generation.generation_id,
        "caller": facts.caller or None,
        "finish_reason": finished.finish_reason.value,
        "error": finished.error.reason if finished.error is not None else None,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "queue_ms": round(stats.queue_ms, 1),
        "time_to_first_token_ms": round(stats.time_to_first_token_ms, 1),
        "prefill_tps": round(stats.prefill_tps, 1),
        "decode_tps": round(stats.decode_tps, 1),
    }
