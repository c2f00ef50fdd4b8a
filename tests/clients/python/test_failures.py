"""Calls that end without a word from the server: past their deadline, unreachable, cut off. One sentence each."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

import mlxstream
from mlxstream.v1.generation_pb2 import GenerateRequest
from tests.clients.python.scripted_server import (
    Context,
    Events,
    ScriptedServer,
    abort,
    endless,
    serving,
    silent,
)

INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"


async def test_every_call_has_a_deadline_unless_it_was_taken_away(server: ScriptedServer) -> None:
    async with mlxstream.AsyncClient(server.target) as client:
        await client.generate("default")
        await client.generate("own", timeout_seconds=5)
    async with mlxstream.AsyncClient(server.target, timeout_seconds=None) as client:
        await client.generate("none")
    default, own, none = server.generations.deadlines_seconds
    assert default is not None
    assert 590 < default < 610
    assert own is not None
    assert 0 < own < 6
    assert none is None


@pytest.mark.parametrize("kind", ["stream", "generate"])
async def test_a_deadline_without_an_answer_says_so(
    kind: str, server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    server.generations.behaviour = silent
    with pytest.raises(mlxstream.DeadlineExceededError) as caught:
        if kind == "stream":
            await anext(aiter(client.stream("hi", timeout_seconds=0.25)))
        else:
            await client.generate("hi", timeout_seconds=0.25)
    assert str(caught.value) == "no answer within 0.25 s"
    assert (caught.value.reason, caught.value.code) == ("DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert caught.value.metadata == {"timeout_seconds": "0.25", "generated_tokens": "0"}


async def test_a_deadline_in_an_answer_tells_and_keeps_what_had_come(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    server.generations.behaviour = endless
    stream = client.stream("hi", timeout_seconds=2)
    received = []
    with pytest.raises(mlxstream.DeadlineExceededError) as caught:
        async for text in stream:
            received.append(text)
    assert len(received) > 1
    assert str(caught.value) == f"stopped by its deadline of 2 s after {len(received)} tokens"
    assert caught.value.reason == mlxstream.LocalReason.DEADLINE
    assert stream.usage == mlxstream.Usage(prompt_tokens=3, generated_tokens=len(received))


async def test_a_deadline_reads_the_same_when_the_servers_clock_is_first(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def give_up(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")
        await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "aborted: deadline", ErrorInfo(reason="ABORTED"))

    server.generations.behaviour = give_up
    with pytest.raises(
        mlxstream.DeadlineExceededError, match=r"stopped by its deadline of 7 s after 1 token$"
    ) as caught:
        async for _ in client.stream("hi", timeout_seconds=7):
            pass
    assert caught.value.reason == "DEADLINE"


@pytest.mark.parametrize("timeout_seconds", [0, -1.5, float("nan"), float("inf")])
async def test_a_deadline_that_is_none_is_refused_at_once(
    timeout_seconds: float, client: mlxstream.AsyncClient
) -> None:
    complaint = "timeout_seconds must be above 0 and finite"
    with pytest.raises(ValueError, match=complaint):
        client.stream("hi", timeout_seconds=timeout_seconds)
    with pytest.raises(ValueError, match=complaint):
        await client.generate("hi", timeout_seconds=timeout_seconds)
    with pytest.raises(ValueError, match=complaint):
        await client.wait_ready(timeout_seconds=timeout_seconds)
    with pytest.raises(ValueError, match=complaint):
        mlxstream.AsyncClient(timeout_seconds=timeout_seconds)


async def test_nobody_at_the_target_is_unavailable() -> None:
    async with serving(endless) as gone:
        target = gone.target
    async with mlxstream.AsyncClient(target) as client:
        for ask in (client.generate("hi"), anext(aiter(client.stream("hi"))), client.health()):
            with pytest.raises(mlxstream.UnavailableError) as caught:
                await ask
            assert str(caught.value).startswith(f"no server answers at {target} (")
            assert caught.value.reason == "UNREACHABLE"


async def test_a_name_that_leads_nowhere_is_told_from_a_server_that_does_not_answer() -> None:
    async with mlxstream.AsyncClient("dns:///localhost:port") as client:
        with pytest.raises(mlxstream.UnavailableError, match="leads to no address") as caught:
            await client.generate("hi")
    assert caught.value.reason == "UNRESOLVABLE_TARGET"


@pytest.mark.parametrize(
    "target", ["localhost", "http://localhost:50051", "localhost:0", "localhost:65536", "a b:1", "[::1:5", "::1:5", ""]
)
def test_what_is_no_target_is_refused_at_once(target: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT or unix:PATH"):
        mlxstream.AsyncClient(target)


@pytest.mark.parametrize("target", ["dns:50051", "a.example:1", "[::1]:5", "[fe80::1%eth0]:5", "unix:/x", "dns:///a:1"])
def test_what_is_a_target_is_taken(target: str) -> None:
    mlxstream.AsyncClient(target)


async def test_a_server_that_is_lost_says_when(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    async def break_off(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # how gRPC tells it

    server.generations.behaviour = break_off
    stream = client.stream("hi")
    with pytest.raises(mlxstream.MlxStreamError) as caught:
        async for _ in stream:
            pass
    assert str(caught.value) == f"{server.target} went away after 1 token"
    assert caught.value.reason == "CONNECTION_LOST"
    assert stream.usage.generated_tokens == 1


async def test_a_server_that_is_lost_before_it_answers_says_so(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def break_off(_request: GenerateRequest, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    server.generations.behaviour = break_off
    with pytest.raises(mlxstream.UnavailableError) as caught:
        await client.generate("hi")
    assert str(caught.value) == f"{server.target} went away before it answered (Socket closed)"
    assert caught.value.reason == "CONNECTION_LOST"


@pytest.mark.parametrize(
    "packed",
    [b"\xff\xff", b"\x1a\x02\x08", Status(details=[Packed(type_url=INFO_URL, value=b"\xff")]).SerializeToString()],
)
async def test_details_that_are_none_hide_no_status(
    server: ScriptedServer, client: mlxstream.AsyncClient, packed: bytes
) -> None:
    """Whatever stands between us and the server may write trailers of its own."""

    async def refuse(_request: GenerateRequest, context: Context) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", packed),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    server.generations.behaviour = refuse
    with pytest.raises(mlxstream.NotFoundError, match="nothing here") as caught:
        await client.generate("hi")
    assert caught.value.reason == ""
