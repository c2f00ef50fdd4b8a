"""Reads a token log from any message on, and waits where it ends: what a caller gets who comes, or comes back.

What was sent before comes again message by message, under the same numbers. After that, tokens that have piled up come
merged, as from a mailbox, so a slow reader holds nothing up and costs no memory.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from engine.contracts.events import GenerationFinished, PrefillProgress, TokensGenerated
from mlxstream.v1 import event_pb2
from service.durable.marks import Position
from service.refusals import TakenOverError
from service.stream import SentBefore

if TYPE_CHECKING:
    from engine.contracts.errors import EngineError
    from service.durable.token_log import TokenLog

LogEvent: TypeAlias = event_pb2.Started | SentBefore | PrefillProgress | TokensGenerated | GenerationFinished


class LogReader:
    """One walk through a log. Close it when nobody walks any more."""

    def __init__(self, log: TokenLog, after_sequence: int) -> None:
        """Everything after that message will be read, and Started before it.

        Raises:
            EngineError: there was no such message; see `TokenLog.position_after`.
        """
        self.position = log.position_after(after_sequence)
        self._log = log
        self._sequence = after_sequence
        self._last_sent = log.marks.last
        self._resumed_tokens = len(log.tokens) if log.marks.last else 0
        self._changed = asyncio.Event()
        self._taken_for: EngineError | None = None
        self._has_started = False
        self._progress: PrefillProgress | None = None
        log.listeners.add(self._changed)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._log.listeners.discard(self._changed)

    def take_away(self, reason: EngineError | None = None) -> None:
        """Whoever waits here is told `reason`; by default that another call reads from now on."""
        self.close()
        self._taken_for = reason or TakenOverError(self._log.header.generation_id)
        self._changed.set()

    @property
    def is_taken(self) -> bool:
        """Whether this reader may read no more."""
        return self._taken_for is not None

    def require_place(self) -> None:
        """Raise `TakenOverError` if another call reads in the place of this one, or why else it may not go on."""
        if self._taken_for is not None:
            raise self._taken_for

    async def next_event(self) -> LogEvent:
        """Wait for the next event: started, then progress and tokens, then the end (again, if asked again).

        Raises:
            TakenOverError: another call has taken the generation over, before or meanwhile.
        """
        self.require_place()
        while (event := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
            self.require_place()
        return event

    def _take(self) -> LogEvent | None:
        log = self._log
        if log.started is None:
            return log.ending
        if not self._has_started:
            self._has_started = True
            self._sequence = max(self._sequence, 1)  # the first message of all is this one
            return self._started(log.started)
        if self._sequence < self._last_sent:
            self._sequence += 1
            return SentBefore(self._advance(log.position_after(self._sequence)))
        end = Position(len(log.tokens), log.characters)
        if end != self.position:
            return self._advance(end)
        if log.progress is not self._progress:
            self._progress = log.progress
            return self._progress
        return log.ending

    def _advance(self, to: Position) -> TokensGenerated:
        """What lies between here and there."""
        begin, self.position = self.position, to
        tokens = tuple(self._log.tokens[begin.tokens : to.tokens])
        return TokensGenerated(tokens, self._log.text_between(begin.characters, to.characters))

    def _started(self, started: event_pb2.Started) -> event_pb2.Started:
        told = event_pb2.Started()
        told.CopyFrom(started)
        told.resumed_tokens = max(started.resumed_tokens, self._resumed_tokens)
        return told
