"""The calls of one client: what goes with each, and farewells to durable streams that were left. Times are seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeVar

import grpc
import grpc.aio

from mlxstream.connection import Connection, Tls, checked_timeout, connect, joined
from mlxstream.errors import MlxStreamError
from mlxstream.failures import CallFacts, client_was_closed, error_of, is_cancelled_by_its_owner
from mlxstream.v1.generation_pb2 import (
    AbortRequest,
    AbortResponse,
    GenerateRequest,
    GenerateResponse,
    ResumeRequest,
)

# How long a client that is closed may take to tell the server of durable streams that were left.
FAREWELL_SECONDS = 2.0

Request = TypeVar("Request")
Response = TypeVar("Response")
StreamCall = (
    grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]
    | grpc.aio.UnaryStreamCall[ResumeRequest, GenerateResponse]
)


class Calls:
    """Owns the connection, which the first call makes, and which belongs to that call's event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        tls: Tls | None,
        balanced: bool,
        timeout_seconds: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        """Nothing is sent yet."""
        self.metadata = metadata
        self._targets = targets
        self._tls = tls
        self._balanced = balanced
        self._timeout_seconds = checked_timeout(timeout_seconds)
        self.target = joined(targets)
        self._connection: Connection | None = None
        self._apart: list[Connection] = []
        self._closed = False
        self._farewells: set[asyncio.Task[None]] = set()

    @property
    def servers(self) -> int:
        """How many can be told apart: those of a list."""
        return len(self._targets)

    def facts(self, timeout_seconds: float | None) -> CallFacts:
        """What is known of a call with this timeout; None means the client's."""
        given = self._timeout_seconds if timeout_seconds is None else checked_timeout(timeout_seconds)
        return CallFacts(target=self.target, timeout_seconds=given)

    def connected(self) -> Connection:
        """The connection; where there are several servers, to all of them."""
        if self._closed:
            raise client_was_closed()
        if self._connection is None:
            self._connection = connect(self.target, tls=self._tls, balanced=self._balanced)
            self._apart = [self._connection]
            if self.servers > 1:
                self._apart = [connect(target, tls=self._tls, balanced=False) for target in self._targets]
        if self._connection.loop is not asyncio.get_running_loop():
            raise RuntimeError("the client belongs to another event loop: make one per loop")
        return self._connection

    async def answer(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_seconds: float | None = None,
    ) -> Response:
        """Make a call with one answer, and turn its failure into a typed error."""
        facts = self.facts(timeout_seconds)
        try:
            return await method(request, timeout=facts.timeout_seconds, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, facts) from error
        except asyncio.CancelledError:
            if is_cancelled_by_its_owner():
                raise
            raise client_was_closed() from None

    def generate(self, request: GenerateRequest, timeout_seconds: float | None) -> StreamCall:
        """Begin a generation."""
        return self.connected().generations.Generate(request, timeout=timeout_seconds, metadata=self.metadata)

    def resume(self, server: int, point: ResumeRequest, timeout_seconds: float | None) -> StreamCall:
        """Go on with a generation, at one of the servers, by its place in their list."""
        self.connected()
        stub = self._apart[server % self.servers].generations
        return stub.Resume(point, timeout=timeout_seconds, metadata=self.metadata)

    async def abort(self, request: AbortRequest, first_server: int = 0) -> AbortResponse:
        """End a generation: ask one server after the other, until one knows it and tells its account.

        Raises:
            MlxStreamError: No server has answered.
        """
        self.connected()
        answer: AbortResponse | None = None
        failure: MlxStreamError | None = None
        for place in range(self.servers):
            stub = self._apart[(first_server + place) % self.servers].generations
            try:
                answer = await self.answer(stub.Abort, request)
            except MlxStreamError as error:
                failure = error
            else:
                if answer.HasField("stats"):
                    return answer
        if answer is None and failure is not None:
            raise failure
        return answer or AbortResponse()

    def part(self, generation: AbortRequest, first_server: int) -> None:
        """Tell the server of a durable generation that nobody reads any more, and wait for nothing.

        Where that fails, the server ends it by itself.
        """

        async def say() -> None:
            with contextlib.suppress(MlxStreamError, RuntimeError):
                await self.abort(generation, first_server)

        farewell = asyncio.get_running_loop().create_task(say(), name=generation.generation_id)
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    async def settle(self, generation_id: str = "") -> None:
        """Wait for the farewell to a generation, since one that comes late would end what is resumed; "": for all."""
        await asyncio.sleep(0)  # a stream that was just left says so on the next turn of the loop
        farewells = {one for one in self._farewells if not generation_id or one.get_name() == generation_id}
        if farewells:
            await asyncio.wait(farewells, timeout=FAREWELL_SECONDS)

    async def close(self) -> None:
        """Close the connection; whoever calls later is told so."""
        self._closed = True
        for connection in {id(one): one for one in (self._connection, *self._apart) if one is not None}.values():
            await connection.channel.close()
