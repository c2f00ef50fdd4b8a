"""A stream that survives: it reconnects and resumes by itself, and gives every token exactly once.

A durable generation outlives its connection, and its server: the server logs what it sends. So whoever loses the
connection asks for what came after the last message. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from mlxstream.errors import (
    DeadlineExceededError,
    LocalReason,
    MlxStreamError,
    OverloadedError,
    ServerError,
    StreamCutError,
    UnavailableError,
)
from mlxstream.failures import CallFacts, client_was_closed
from mlxstream.stream import Call, EventReader
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import GenerateResponse

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
# What the server says of a point that its log has lost; what lies before it is whole.
LOST_POINT_REASONS = ("RESUME_POINT_GONE", "CHECKPOINT_DAMAGED")
# What a lost connection can look like where gRPC does not say that the server is unavailable.
TRANSPORT_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The stream was lost, or could not be resumed; after `pause_seconds` the next try is made.

    `attempt` counts the tries since the last message. `generated_tokens` have been handed out.
    """

    error: MlxStreamError
    attempt: int
    pause_seconds: float
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The stream goes on. `resumed_tokens` were there already when it did, those handed out before included."""

    attempt: int
    generated_tokens: int
    resumed_tokens: int


DurableEvent = Interruption | Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """How a stream survives.

    Attributes:
        on_event: Called with each `Interruption` and `Resumption`, on the client's event loop; it must not block.
        patience_seconds: Longest time without a message, from the loss on; then the error is raised. The deadline of
            the whole stream holds besides.
        first_patience_seconds: The same for a server that was never heard of: it may be starting, or a mistake.
    """

    on_event: Callable[[DurableEvent], None] | None = None
    patience_seconds: float = 300.0
    first_patience_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls that a durable stream is made of.

    Attributes:
        begin: Sends the request, with a timeout.
        resume: Goes on with the generation of an id after a message, with a timeout.
        abort: Has the generation of an id ended ("": that of the request), and waits for nothing.
        settle: Waits until the generation of an id is ended, if it is being ended: who resumes it must come after.
    """

    begin: Callable[[float | None], Call]
    resume: Callable[[str, int, float | None], Call]
    abort: Callable[[str], None]
    settle: Callable[[str], Awaitable[None]]


class DurableReader:
    """Reads one generation through as many calls as it takes; otherwise like an `EventReader`."""

    def __init__(
        self,
        calls: Calls,
        facts: CallFacts,
        durability: Durability,
        *,
        generation_id: str = "",
        after_sequence: int = 0,
    ) -> None:
        """Begin anew, or go on with the generation of this id after a message."""
        self._calls = calls
        self._facts = facts
        self._durability = durability
        self._generation_id = generation_id
        self._first_sequence = self.sequence = after_sequence
        self._characters = self._place = 0
        self._current: EventReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: float | None = None
        self._woken = asyncio.Event()
        self._ended = False
        self._parted = False
        self._attempt = 0
        self._lost_at = 0.0
        self._held: GenerateResponse | None = None
        self._failure: MlxStreamError | None = None
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.generated_tokens = 0

    async def read(self) -> GenerateResponse | None:
        """The next event; None after the last one, and after `cancel`. A loss of the connection is not seen here."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._loop is None:
            await self._begin()
        while not self._ended:
            try:
                response = await self._opened().read()
            except MlxStreamError as error:
                if (last := await self._recover(error)) is not None:
                    return last
                continue
            except asyncio.CancelledError:
                self.cancel()
                raise
            if response is None:
                self._ended = True
            elif (news := self._news(response)) is not None:
                return news
        return None

    def cancel(self) -> None:
        """End the generation, from any thread; without effect once it has ended."""
        if self._ended:
            return
        self._ended = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def part(self) -> None:
        """Tell the server that nobody reads any more, for whom it would wait: the client is about to be closed."""
        if self._loop is not None and not self._ended:
            self._say_farewell()

    def _leave(self) -> None:
        """Stop reading, and tell the server."""
        self._woken.set()
        if self._current is not None:
            self._current.cancel()
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Have the generation ended by name, once, and not where it has ended by itself."""
        if not self._parted and self.finished is None:
            self._parted = True
            self._calls.abort(self._generation_id)

    async def _begin(self) -> None:
        """Before the first call: let a farewell to this very generation be through, and start the clock."""
        if self._generation_id:
            await self._calls.settle(self._generation_id)
        self._loop = asyncio.get_running_loop()
        given = self._facts.timeout_seconds
        self._deadline = None if given is None else self._loop.time() + given

    def _opened(self) -> EventReader:
        """The call in hand, or the next one."""
        if self._current is None:
            self._current = EventReader(self._open, self._facts)
        return self._current

    def _open(self) -> Call:
        if not self._generation_id:
            return self._calls.begin(self._seconds_left())
        if self.sequence == self._first_sequence:
            self._place = 0
        return self._calls.resume(self._generation_id, self.sequence, self._seconds_left())

    def _news(self, response: GenerateResponse) -> GenerateResponse | None:
        """What the caller has not had of `response`; None if that is nothing."""
        if self._attempt and response.WhichOneof("event") == "started":
            self._tell_of_resumption(response.started)
        self._attempt = 0
        self.sequence = response.sequence
        match response.WhichOneof("event"):
            case "started":
                is_first, self.started = self.started is None, self.started or response.started
                self._generation_id = response.started.generation_id
                return response if is_first else None
            case "chunk":
                return self._new_part(response)
            case "finished" if response.finished.HasField("error"):
                self._held = response  # whether it is the end shows in a moment
                return None
            case "finished":
                self.finished = response.finished
        return response

    def _new_part(self, response: GenerateResponse) -> GenerateResponse | None:
        """A chunk without what an earlier call has brought already."""
        chunk = response.chunk
        new = [token for token in chunk.tokens if token.index >= self.generated_tokens]
        if len(new) < len(chunk.tokens):
            del chunk.tokens[: len(chunk.tokens) - len(new)]
        known_characters = max(0, self._characters - self._place)
        self._place += len(chunk.text)
        chunk.text = chunk.text[known_characters:]
        self._characters += len(chunk.text)
        if new:
            self.generated_tokens = new[-1].index + 1
        return response if new or chunk.text else None

    async def _recover(self, error: MlxStreamError) -> GenerateResponse | None:
        """Wait until the next try is due; without one, the last event that there is, or else the error is raised."""
        self._current = None
        if self._ended or self._loop is None:
            return None
        if self._parted:
            self._ended = True
            raise client_was_closed() from error
        now = self._loop.time()
        if not self._attempt:
            self._lost_at = now
        pause_seconds = self._pause_seconds(error)
        if not self._may_try_again(error, now + pause_seconds):
            return self._failed(error)
        self._held = None
        self._attempt += 1
        self._tell(
            Interruption(
                error=error,
                attempt=self._attempt,
                pause_seconds=pause_seconds,
                generated_tokens=self.generated_tokens,
            )
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), pause_seconds)
        return None

    def _pause_seconds(self, error: MlxStreamError) -> float:
        """Longer from try to try, a little different for everybody, and never shorter than the server asks for."""
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._attempt, 10))
        return max(pause * random.uniform(0.5, 1.0), error.retry_after_seconds or 0.0)  # noqa: S311 - not a secret

    def _may_try_again(self, error: MlxStreamError, at: float) -> bool:
        if at > self._lost_at + self._durability.patience_seconds or (
            self._deadline is not None and at > self._deadline
        ):
            return False
        if error.reason in LOST_POINT_REASONS and self.sequence != self._first_sequence:
            self.sequence = self._first_sequence  # the log has lost its end: everything is said again, and skipped
            return True
        if self.started is None and error.reason == LocalReason.UNREACHABLE:
            return at <= self._lost_at + self._durability.first_patience_seconds
        return is_transient(error) and error.reason != LocalReason.UNRESOLVABLE_TARGET

    def _failed(self, error: MlxStreamError) -> GenerateResponse | None:
        self._ended = True
        if isinstance(error, DeadlineExceededError):
            self._say_farewell()
        if self._held is None:
            raise error
        self.finished, self._failure = self._held.finished, error
        return self._held

    def _seconds_left(self) -> float | None:
        if self._deadline is None or self._loop is None:
            return None
        return max(0.0, self._deadline - self._loop.time())

    def _tell_of_resumption(self, started: Started) -> None:
        self._tell(
            Resumption(
                attempt=self._attempt,
                generated_tokens=self.generated_tokens,
                resumed_tokens=started.resumed_tokens,
            )
        )

    def _tell(self, event: DurableEvent) -> None:
        if self._durability.on_event is not None:
            self._durability.on_event(event)


def is_transient(error: MlxStreamError) -> bool:
    """Whether the same call may succeed soon: the server is away, restarts, or is full and says for how long."""
    if isinstance(error, UnavailableError | StreamCutError):
        return True
    if isinstance(error, OverloadedError):
        return error.retry_after_seconds is not None
    return isinstance(error, ServerError) and error.code in TRANSPORT_CODES and not error.reason
