"""Reads one generation through as many calls as it takes, remembers what matters, and can end it.

A durable one outlives its connection, and its server, which logs what it sends: whoever loses the connection asks for
what came after the last message, and gives every token exactly once. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc.aio

from mlxstream.calls import Calls, StreamCall
from mlxstream.durable import Durability, DurableEvent, Interruption, Resumption, is_transient
from mlxstream.errors import DeadlineExceededError, LocalReason, MlxStreamError, NotFoundError, StreamCutError
from mlxstream.failures import CallFacts, client_was_closed, error_of, is_cancelled_by_its_owner
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import AbortRequest, GenerateRequest, GenerateResponse, ResumeRequest

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
# What the server says of a point that its log has lost; what lies before it is whole.
LOST_POINT_REASONS = ("RESUME_POINT_GONE", "CHECKPOINT_DAMAGED")


class EventReader:
    """See the module. Without a `durability` there is one call, and its loss is an error."""

    def __init__(
        self,
        calls: Calls,
        facts: CallFacts,
        request: GenerateRequest,
        durability: Durability | None = None,
        *,
        generation_id: str = "",
        after_sequence: int = 0,
    ) -> None:
        """Begin with `request`, or go on with the generation of this id after a message."""
        self._calls = calls
        self._facts = facts
        self._request = request
        self._durability = durability
        self._generation_id = generation_id
        self._first_sequence = self.sequence = after_sequence
        self._characters = self._place = 0
        self._call: StreamCall | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: float | None = None
        self._woken = asyncio.Event()
        self._ended = False
        self._parted = False
        self._attempt = 0
        self._lost_at = 0.0
        # Who is asked to go on, whether that one has not answered yet, how many in a row have refused, and why.
        self._server = self._refusals = 0
        self._is_asking = False
        self._verdict: MlxStreamError | None = None
        self._held: GenerateResponse | None = None
        self._failure: MlxStreamError | None = None
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.generated_tokens = 0

    async def read(self) -> GenerateResponse | None:
        """The next event; None after the last one, and after `cancel`."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._loop is None and not self._ended:
            await self._begin()
        while not self._ended:
            try:
                response = await self._receive()
            except MlxStreamError as error:
                self._call = None
                if (last := await self._recover(error)) is not None:
                    return last
                continue
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
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and the call with it
                self._loop.call_soon_threadsafe(self._leave)

    def part(self) -> None:
        """Have a durable generation ended by name, once, since it does not end with its call."""
        is_under_way = self._durability is not None and self._loop is not None and self.finished is None
        if is_under_way and not self._parted:
            self._parted = True
            by_id, by_request = self._generation_id or None, self._request.request_id or None
            request = AbortRequest(generation_id=by_id, request_id=None if by_id else by_request)
            self._calls.part(request, self._server)

    def close(self) -> None:
        """The client is about to be closed: tell the server that nobody reads any more."""
        if not self._ended:
            self.part()

    def _leave(self) -> None:
        """Stop reading, and tell the server."""
        self._woken.set()
        if self._call is not None:
            self._call.cancel()
        self.part()

    async def _begin(self) -> None:
        """Before the first call: let a farewell to this very generation be through, and start the clock."""
        if self._generation_id:
            await self._calls.settle(self._generation_id)
        self._loop = asyncio.get_running_loop()
        given = self._facts.timeout_seconds
        self._deadline = None if given is None else self._loop.time() + given

    async def _receive(self) -> GenerateResponse | None:
        """The next message of the call in hand, or of the next one; None where it has ended as it should."""
        if self._call is None:
            self._call = self._open()
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            self._settle_cancellation()
            return None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._facts, self.generated_tokens if self.started else None) from error
        if isinstance(response, GenerateResponse):
            return response
        if self.finished is None:
            raise StreamCutError
        return None

    def _settle_cancellation(self) -> None:
        """Tell apart who cancelled: this task's owner, we ourselves, or the closing client."""
        if is_cancelled_by_its_owner():
            self.cancel()
            raise asyncio.CancelledError
        if not self._ended:
            raise client_was_closed()

    def _open(self) -> StreamCall:
        seconds = self._seconds_left()
        if self.sequence == self._first_sequence:
            self._place = 0
        if not self._generation_id:
            return self._calls.generate(self._request, seconds)
        self._is_asking = True
        point = ResumeRequest(generation_id=self._generation_id, after_sequence=self.sequence)
        return self._calls.resume(self._server, point, seconds)

    def _news(self, response: GenerateResponse) -> GenerateResponse | None:
        """What the caller has not had of `response`; None if that is nothing."""
        if self._attempt and response.WhichOneof("event") == "started":
            self._tell_of_resumption(response.started)
        self._attempt = self._refusals = 0
        self._is_asking, self._verdict = False, None
        self.sequence = response.sequence
        match response.WhichOneof("event"):
            case "started":
                is_first, self.started = self.started is None, self.started or response.started
                self._generation_id = response.started.generation_id
                return response if is_first else None
            case "chunk":
                return self._new_part(response)
            case "finished" if response.finished.HasField("error") and self._durability is not None:
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
        if known_characters:
            chunk.text = chunk.text[known_characters:]
        self._characters += len(chunk.text)
        if new:
            self.generated_tokens = new[-1].index + 1
        return response if new or chunk.text else None

    async def _recover(self, error: MlxStreamError) -> GenerateResponse | None:
        """Wait until the next try is due; without one, the last event that there is, or else the error is raised."""
        if self._ended or self._loop is None:
            return None
        if self._parted:
            self._ended = True
            raise client_was_closed() from error
        verdict = self._verdict_on(error)
        if verdict is None:
            return None
        now = self._loop.time()
        if not self._attempt:
            self._lost_at = now
        pause_seconds = self._pause_seconds(verdict)
        if not self._may_try_again(verdict, now + pause_seconds):
            return self._failed(verdict)
        self._held = None
        self._attempt += 1
        self._tell(
            Interruption(
                error=verdict,
                attempt=self._attempt,
                pause_seconds=pause_seconds,
                generated_tokens=self.generated_tokens,
            )
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), pause_seconds)
        return None

    def _verdict_on(self, error: MlxStreamError) -> MlxStreamError | None:
        """What an error comes to; None where another server is to be asked, as one does not know the generation.

        Whoever could not be asked may know it yet, so that it is not found only where all have said so.
        """
        is_not_found = isinstance(error, NotFoundError)
        if not self._is_asking or not (is_not_found or is_transient(error)):
            return error
        if self._verdict is None or not is_not_found:
            self._verdict = error
        self._server, self._refusals = self._server + 1, self._refusals + 1
        if self._refusals < self._calls.servers:
            return None
        verdict, self._verdict, self._refusals = self._verdict, None, 0
        return verdict

    def _pause_seconds(self, error: MlxStreamError) -> float:
        """Longer from try to try, a little different for everybody, and never shorter than the server asks for."""
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._attempt, 10))
        return max(pause * random.uniform(0.5, 1.0), error.retry_after_seconds or 0.0)  # noqa: S311 - not a secret

    def _may_try_again(self, error: MlxStreamError, at: float) -> bool:
        durability = self._durability
        if durability is None or at > self._lost_at + durability.patience_seconds:
            return False
        if self._deadline is not None and at > self._deadline:
            return False
        if error.reason in LOST_POINT_REASONS and self.sequence != self._first_sequence:
            self.sequence = self._first_sequence  # the log has lost its end: everything is said again, and skipped
            return True
        if self.started is None and error.reason == LocalReason.UNREACHABLE:
            return at <= self._lost_at + durability.first_patience_seconds
        return is_transient(error) and error.reason != LocalReason.UNRESOLVABLE_TARGET

    def _failed(self, error: MlxStreamError) -> GenerateResponse | None:
        self._ended = True
        if isinstance(error, DeadlineExceededError):
            self.part()
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
        if self._durability is not None and self._durability.on_event is not None:
            self._durability.on_event(event)
