"""One generation as it happens: an asynchronous iterator over its text or its events, and its account.

Whoever leaves the iteration ends the generation: by `cancel`, at the end of an `async with` block, and as soon as
the iterator is dropped (which `break` does). A cancelled task ends it too.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, TypeVar

from mlxstream.reader import EventReader
from mlxstream.results import FinishReason, Usage
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import GenerateResponse
from mlxstream.v1.result_pb2 import GenerateStats

Item = TypeVar("Item")


class Iteration(AsyncIterator[Item], Generic[Item]):
    """Walks a reader's events and gives what `pick` takes from each. Dropping it ends the generation."""

    def __init__(self, reader: EventReader, pick: Callable[[GenerateResponse], Item | None]) -> None:
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

    def __init__(self, reader: EventReader) -> None:
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
