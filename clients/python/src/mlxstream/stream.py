"""One generation as it happens: an asynchronous iterator over its text or its events, and its account.

Whoever leaves the iteration ends the generation: by `cancel`, at the end of an `async with` block, and as soon as
the iterator is dropped (which `break` does). A cancelled task ends it too.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import grpc.aio

from mlxstream.errors import StreamCutError
from mlxstream.failures import CallFacts, client_was_closed, error_of, is_cancelled_by_its_owner
from mlxstream.results import FinishReason, Usage
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import GenerateRequest, GenerateResponse, ResumeRequest
from mlxstream.v1.result_pb2 import GenerateStats

Item = TypeVar("Item")
Call = (
    grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]
    | grpc.aio.UnaryStreamCall[ResumeRequest, GenerateResponse]
)


class EventReader:
    """Owns the call of one generation. Opens it at the first read, remembers what matters, and can end it."""

    def __init__(self, open_call: Callable[[], Call], facts: CallFacts) -> None:
        self._open_call = open_call
        self._facts = facts
        self._call: Call | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.generated_tokens = 0
        self.sequence = 0

    async def read(self) -> GenerateResponse | None:
        """The next event; None after the last one, and after `cancel`."""
        if self._ended:
            return None
        if self._call is None:
            self._loop = asyncio.get_running_loop()
            self._call = self._open_call()
            if self._ended:  # by another thread, which saw no call yet
                self._call.cancel()
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            self._settle_cancellation()
            return None
        except grpc.aio.AioRpcError as error:
            self._ended = True
            raise error_of(error, self._facts, self.generated_tokens if self.started else None) from error
        if isinstance(response, GenerateResponse):
            self._remember(response)
            return response
        self._ended = True
        if self.finished is None:
            raise StreamCutError
        return None

    def cancel(self) -> None:
        """End the generation, from any thread; without effect once it has ended."""
        if self._ended:
            return
        self._ended = True
        if self._call is None or self._loop is None or self._loop.is_closed():
            return
        if _running_loop() is self._loop:
            self._call.cancel()
        else:
            self._loop.call_soon_threadsafe(self._call.cancel)

    def _settle_cancellation(self) -> None:
        """Tell apart who cancelled: this task's owner, we ourselves, or the closing client."""
        ended_by_us = self._ended
        self.cancel()
        if is_cancelled_by_its_owner():
            raise asyncio.CancelledError
        if not ended_by_us:
            raise client_was_closed()

    def _remember(self, response: GenerateResponse) -> None:
        self.sequence = response.sequence
        event = response.WhichOneof("event")
        if event == "started":
            self.started = response.started
        elif event == "chunk":
            self.generated_tokens += len(response.chunk.tokens)
        elif event == "finished":
            self.finished = response.finished


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Reader(Protocol):
    """What a stream is read through, whether one call carries it or several."""

    started: Started | None
    finished: Finished | None
    generated_tokens: int
    sequence: int

    async def read(self) -> GenerateResponse | None:
        """The next event; None after the last one, and after `cancel`."""

    def cancel(self) -> None:
        """End the generation, from any thread; without effect once it has ended."""


class Iteration(AsyncIterator[Item], Generic[Item]):
    """Walks a reader's events and gives what `pick` takes from each. Dropping it ends the generation."""

    def __init__(self, reader: Reader, pick: Callable[[GenerateResponse], Item | None]) -> None:
        self._reader = reader
        self._pick = pick
        weakref.finalize(self, reader.cancel).atexit = False

    async def advance(self) -> Item | None:
        """The next item, or None at the end."""
        while (response := await self._reader.read()) is not None:
            if (item := self._pick(response)) is not None:
                return item
        return None

    async def __anext__(self) -> Item:
        if (item := await self.advance()) is None:
            raise StopAsyncIteration
        return item


class StreamAccount:
    """What a stream knows of its generation, and how to end it, for either kind of iteration."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        state = self.finish_reason or ("under way" if self.started else "no event yet")
        return f"<{type(self).__name__}: {state}, {self.usage.generated_tokens} generated tokens>"

    def cancel(self) -> None:
        """End the generation now, from any thread. An iteration that is under way stops without an error."""
        self._reader.cancel()

    @property
    def started(self) -> Started | None:
        """The first event; None before it."""
        return self._reader.started

    @property
    def finished(self) -> Finished | None:
        """The last event; None before it, and when the generation was cancelled from here."""
        return self._reader.finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None before it has."""
        return FinishReason.of(self.finished) if self.finished else None

    @property
    def matched_stop(self) -> str:
        """The stop sequence that was met; empty where none was."""
        return self.finished.matched_stop if self.finished else ""

    @property
    def stats(self) -> GenerateStats | None:
        """The account of the whole generation; None before its end."""
        return self.finished.stats if self.finished else None

    @property
    def sequence(self) -> int:
        """Number of the last event that was received, for `resume`; before the first, what the stream began after."""
        return self._reader.sequence

    @property
    def usage(self) -> Usage:
        """The tokens used so far, by what has arrived; final once the generation has ended."""
        prompt = self.started or Started()
        return Usage(
            prompt_tokens=prompt.prompt_tokens,
            cached_tokens=prompt.cached_tokens,
            generated_tokens=self.stats.generated_tokens if self.stats else self._reader.generated_tokens,
        )


class AsyncTextStream(StreamAccount):
    """One generation. Iterate over it for its text, or over `events()` for everything.

    The request is sent when the iteration begins.
    """

    def __aiter__(self) -> Iteration[str]:
        """The text, piece by piece: joined, they are the completion."""
        return Iteration(self._reader, text_of)

    def events(self) -> Iteration[GenerateResponse]:
        """Every message of the stream, the last one included."""
        return Iteration(self._reader, event_of)

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def text_of(response: GenerateResponse) -> str | None:
    """What an event adds to the text; None where it adds nothing."""
    return response.chunk.text or None


def event_of(response: GenerateResponse) -> GenerateResponse:
    """The event itself."""
    return response
