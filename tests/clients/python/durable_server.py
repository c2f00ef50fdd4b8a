"""A server of durable generations that fails as the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from mlxstream.v1 import generation_pb2_grpc
from mlxstream.v1.error_pb2 import GenerationError
from mlxstream.v1.event_pb2 import Finished, Heartbeat, Started, TokenChunk
from mlxstream.v1.generation_pb2 import AbortRequest, AbortResponse, GenerateRequest, GenerateResponse, ResumeRequest
from mlxstream.v1.result_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, GeneratedToken, GenerateStats
from tests.clients.python.scripted_server import abort

WORDS = [f"{place} " for place in range(20)]
EVERYTHING = "".join(WORDS)


@dataclass(frozen=True)
class Failure:
    """A call ends after so many messages: with a status, or (code None) as if it had come to its end."""

    after: int
    code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE
    reason: str = ""
    retry_seconds: float | None = None
    told: bool = False


@dataclass
class DurableServer(generation_pb2_grpc.GenerationServiceServicer):
    """Says `WORDS`, `tokens_per_message` at a time; each call has the next of `failures`, or none.

    `knows`: whether the generations that Abort names are this server's.
    """

    failures: list[Failure | None] = field(default_factory=list)
    tokens_per_message: int = 1
    endless: bool = False
    silent: bool = False
    generates: list[GenerateRequest] = field(default_factory=list)
    resumes: list[ResumeRequest] = field(default_factory=list)
    aborts: list[AbortRequest] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=lambda: {0: 0})
    farewell_seconds: float = 0.0
    knows: bool = True
    order: list[str] = field(default_factory=list)

    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.generates.append(request)
        await self._say(0, context)

    async def Resume(self, request: ResumeRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.resumes.append(request)
        self.order.append("resumed")
        await self._say(request.after_sequence, context)

    async def Abort(self, request: AbortRequest, _context: Any) -> AbortResponse:  # type: ignore[override]  # noqa: N802
        self.aborts.append(request)
        await asyncio.sleep(self.farewell_seconds)
        self.order.append("aborted")
        return AbortResponse(stats=GenerateStats()) if self.knows else AbortResponse()

    async def _say(self, sequence: int, context: Any) -> None:
        self.deadlines.append(context.time_remaining())
        if self.silent:
            await asyncio.Event().wait()
        failure = self.failures.pop(0) if self.failures else None
        left = failure.after if failure is not None else 1000
        place, messages = self.sent[sequence], self._messages(self.sent[sequence])
        for message in messages:
            if not left:
                break
            left -= 1
            sequence += 1
            place += len(message.chunk.tokens)
            self.sent[sequence] = place
            message.sequence = sequence
            await context.write(message)
        if failure is not None:
            await self._fail(failure, sequence + 1, context)
        elif self.endless:
            await asyncio.Event().wait()

    def _messages(self, place: int) -> list[GenerateResponse]:
        started = Started(generation_id="g1", request_id="r1", prompt_tokens=3, resumed_tokens=place)
        messages = [GenerateResponse(started=started), GenerateResponse(heartbeat=Heartbeat())]
        for start in range(place, len(WORDS), self.tokens_per_message):
            words = WORDS[start : start + self.tokens_per_message]
            tokens = [GeneratedToken(token=100 + one, index=one) for one in range(start, start + len(words))]
            messages.append(GenerateResponse(chunk=TokenChunk(tokens=tokens, text="".join(words))))
        if not self.endless:
            messages.append(GenerateResponse(finished=Finished(finish_reason=FINISH_REASON_STOP)))
        return messages

    async def _fail(self, failure: Failure, sequence: int, context: Any) -> None:
        if failure.told:
            finished = Finished(finish_reason=FINISH_REASON_ERROR, error=GenerationError(message="told"))
            await context.write(GenerateResponse(sequence=sequence, finished=finished))
            self.sent[sequence] = self.sent[sequence - 1]
        if failure.code is None:
            return
        details: list[Any] = [ErrorInfo(reason=failure.reason)] if failure.reason else []
        if failure.retry_seconds is not None:
            retry = RetryInfo()
            retry.retry_delay.FromNanoseconds(round(failure.retry_seconds * 1e9))
            details.append(retry)
        await abort(context, failure.code, "as scripted", *details)


@contextlib.asynccontextmanager
async def durable_server() -> AsyncIterator[tuple[DurableServer, str]]:
    """One that runs, and its target."""
    servicer, running = DurableServer(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await running.stop(None)
