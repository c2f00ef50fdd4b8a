"""From the engine thread to the event loop: one hand-off per step, merged into one mailbox per generation.

A mailbox is used on the loop alone. What it holds is bounded by the generation itself (its prompt and `max_tokens`
fit the context), and a slow reader finds one merged event instead of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING

from engine.contracts.errors import GenerationFailedError
from engine.contracts.events import (
    CanvasRevised,
    GenerationFinished,
    GenerationStarted,
    PrefillProgress,
    TokensGenerated,
)
from engine.contracts.results import FinishReason, GenerateStats
from engine.execution.isolation import new_correlation_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.events import GenerationEvent
    from engine.contracts.results import GeneratedToken

logger = logging.getLogger(__name__)


class _WaitingTokens:
    """Tokens and text that nobody has read yet."""

    __slots__ = ("_text", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[GeneratedToken] = []
        self._text: list[str] = []

    def add(self, event: TokensGenerated) -> None:
        self._tokens.extend(event.tokens)
        self._text.append(event.text)

    def event(self) -> TokensGenerated:
        return TokensGenerated(tuple(self._tokens), "".join(self._text))


class Mailbox:
    """Events of one generation, merged until they are read."""

    def __init__(self, on_finished: Callable[[], None]) -> None:
        """`on_finished` runs once, when the end arrives."""
        self._on_finished = on_finished
        self._arrived = asyncio.Event()
        self._done = asyncio.Event()
        self._started: GenerationStarted | None = None
        self._has_started = False
        self._progress: PrefillProgress | None = None
        self._output: deque[_WaitingTokens | CanvasRevised] = deque()
        self._finished: GenerationFinished | None = None

    @property
    def has_started(self) -> bool:
        """Whether the generation has left the queue, read or not."""
        return self._has_started

    def put(self, event: GenerationEvent) -> None:
        """Merge one event; whatever follows the end is dropped."""
        if self._finished is not None:
            return
        match event:
            case TokensGenerated():
                self._add(event)
            case CanvasRevised():
                self._replace(event)
            case PrefillProgress():
                self._progress = event
            case GenerationStarted():
                self._started = event
                self._has_started = True
            case GenerationFinished():
                self.end(event)
        self._arrived.set()

    def end(self, event: GenerationFinished) -> None:
        """Take the end, whatever was put before; only the first counts."""
        if self._finished is None:
            self._finished = event
            self._done.set()
            self._arrived.set()
            self._on_finished()

    async def next_event(self) -> GenerationEvent:
        """Wait for the next event: started, then progress and merged tokens, then the end (again, if asked again)."""
        while True:
            event = self._take()
            if event is not None:
                return event
            self._arrived.clear()
            await self._arrived.wait()

    async def finished(self) -> GenerationFinished:
        """Wait for the end without reading events."""
        await self._done.wait()
        if self._finished is None:
            raise RuntimeError("the mailbox was marked done without an end")
        return self._finished

    def _add(self, event: TokensGenerated) -> None:
        """Join tokens to those that wait last."""
        newest = self._output[-1] if self._output else None
        if not isinstance(newest, _WaitingTokens):
            newest = _WaitingTokens()
            self._output.append(newest)
        newest.add(event)

    def _replace(self, event: CanvasRevised) -> None:
        """Of one block keep the newest canvas alone: at most two things wait for each block."""
        if self._output and isinstance(self._output[-1], CanvasRevised):
            self._output.pop()
        self._output.append(event)

    def _take(self) -> GenerationEvent | None:
        if self._started is not None:
            started, self._started = self._started, None
            return started
        if self._output:
            self._progress = None
            first = self._output.popleft()
            return first if isinstance(first, CanvasRevised) else first.event()
        if self._progress is not None:
            progress, self._progress = self._progress, None
            return progress
        return self._finished


class Dispatcher:
    """Carries batches of events from the engine thread to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on `loop`."""
        self._loop = loop

    def deliver(self, batch: Sequence[tuple[Mailbox, GenerationEvent]]) -> None:
        """Hand over one step's events for all rows at once. Safe from any thread, also after the loop has closed."""
        if batch:
            self.call(_put_all, batch)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function` on the loop soon; nothing happens once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _put_all(batch: Sequence[tuple[Mailbox, GenerationEvent]]) -> None:
    for mailbox, event in batch:
        try:
            mailbox.put(event)
        except Exception:
            _break(mailbox)


def _break(mailbox: Mailbox) -> None:
    """End a generation whose mailbox fails; the others of the step hear what they are due."""
    correlation_id = new_correlation_id()
    logger.exception("a mailbox failed (correlation id %s)", correlation_id)
    error = GenerationFailedError(correlation_id)
    try:
        mailbox.end(GenerationFinished(finish_reason=FinishReason.ERROR, stats=GenerateStats(), error=error))
    except Exception:
        logger.exception("a mailbox that failed cannot be ended (correlation id %s)", correlation_id)
