"""Messages on their way: whoever stops halfway holds nothing for long, and counts meanwhile."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from engine.contracts.errors import NotFoundError
from service.arrival import OF_PROBES, Arrival
from service.limits import RequestLimits
from service.offer import Offer
from service.refusals import MessageLateError
from service.rpc import _parse_each
from tests.service.fake_engine import FakeEngine
from tests.service.half_sent import half_sender
from tests.service.harness import Serving, read_all, reason_of, serve, text_request
from tests.waiting import until

CODE = grpc.StatusCode
GENERATE = "/mlxstream.v1.GenerationService/Generate"
CHECK = "/grpc.health.v1.Health/Check"
ABORT = "/mlxstream.v1.GenerationService/Abort"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LATE = b"the time in which a message must arrive, in seconds: 1 of 1 taken"
WAIT_SECONDS = 60


def port_of(running: Serving) -> int:
    return int(str(running.address).rpartition(":")[2])


async def test_half_a_message_ends_its_call_in_time_and_is_told_how_long_that_is() -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_message_seconds=0.1))) as running:
        async with half_sender(port_of(running)) as client:
            client.begin(GENERATE, sent=b"x" * 10)
            assert LATE in await client.ending()
        assert running.engine.requests == []


@pytest.mark.parametrize("path", [CHECK, REFLECTION, ABORT, "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"])
async def test_half_a_message_of_somebody_who_is_not_counted_has_a_short_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OF_PROBES.limit_seconds < RequestLimits().max_message_seconds
    monkeypatch.setattr("service.gate.OF_PROBES", Arrival(limit_seconds=0.1))
    async with serve(FakeEngine()) as running, half_sender(port_of(running)) as client:
        client.begin(path)
        assert LATE in await client.ending()


async def test_a_call_counts_from_its_headers_until_it_has_ended() -> None:
    async with serve(FakeEngine(), Offer(limits=RequestLimits(max_streams=1))) as running:

        async def is_refused() -> bool:
            _, error = await read_all(running.generation.Generate(text_request()))
            assert error is None or reason_of(error) == "OVERLOADED"
            return error is not None

        async with half_sender(port_of(running)) as client:
            client.begin(GENERATE)
            async with asyncio.timeout(WAIT_SECONDS):
                while not await is_refused():
                    pass
        async with asyncio.timeout(WAIT_SECONDS):
            while await is_refused():
                pass


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHECK, health_pb2.HealthCheckRequest(service="x" * 20_000)),
        (REFLECTION, reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * 20_000)),
    ],
)
async def test_what_needs_no_token_takes_no_large_message(path: str, message: Any) -> None:
    async with serve(FakeEngine()) as running:
        call = running.channel.stream_stream(path)(iter([message.SerializeToString()]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is CODE.RESOURCE_EXHAUSTED
        assert reason_of(failure.value) == "MESSAGE_TOO_LARGE"
        assert f"the request has {message.ByteSize()} bytes, 16384 are allowed" in str(failure.value.details())


class TalkativeContext:
    """A call that asks at once, and then never again."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)


async def test_a_stream_of_questions_that_falls_silent_ends_well() -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    context: Any = TalkativeContext(asked.SerializeToString(), asked.SerializeToString())
    stream = _parse_each(type(asked), Arrival(limit_seconds=0.01), context)
    assert [message async for message in stream] == [asked, asked]
    with pytest.raises(MessageLateError):
        await anext(_parse_each(type(asked), Arrival(limit_seconds=0.01), context))


async def test_a_call_without_a_message_is_told_so() -> None:
    async with serve(FakeEngine()) as running:
        call = running.channel.stream_stream(GENERATE)(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert reason_of(failure.value) == "MALFORMED_MESSAGE"


async def test_what_was_refused_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that its own traceback keeps would keep the message too, until somebody looks for such circles."""
    seen: list[weakref.ref[NotFoundError]] = []

    class WatchedError(NotFoundError):
        def __init__(self, kind: str, name: str) -> None:
            super().__init__(kind, name)
            seen.append(weakref.ref(self))

    monkeypatch.setattr("service.health.NotFoundError", WatchedError)
    async with serve(FakeEngine()) as running:
        gc.disable()
        try:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest(service="none"))
            await until(lambda: seen[0]() is None)
        finally:
            gc.enable()


class SocketContext:
    """A call whose message comes through a socket, as gRPC's news does."""

    def __init__(self, there: socket.socket) -> None:
        self._there = there

    async def read(self) -> bytes:
        loop, came = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        loop.add_reader(self._there, lambda: came.done() or came.set_result(self._there.recv(10)))
        try:
            return bytes(await came)
        finally:
            loop.remove_reader(self._there)


async def test_a_message_that_came_while_the_loop_was_held_up_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, late_seconds = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + late_seconds[0])
    here, there = socket.socketpair()
    with here, there:
        context: Any = SocketContext(there)

        def hold_up() -> None:
            late_seconds[0] += 4000
            here.send(b"hi")

        loop.call_soon(hold_up)
        assert await Arrival(limit_seconds=3000).message(context) == b"hi"
        with pytest.raises(MessageLateError):
            await Arrival(limit_seconds=0.01).message(context)
