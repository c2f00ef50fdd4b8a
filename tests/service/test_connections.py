"""Connections that break, that nobody is behind any more, and that ask too often whether we are here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc_channelz.v1 import channelz_pb2

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import generation_pb2_grpc
from service.address import Address
from service.channelz import CHANNELZ_SERVICE
from service.offer import Offer
from tests.service.fake_engine import FakeEngine, FakeGeneration, never_end
from tests.service.harness import Serving, open_channel, reason_of, serve, text_request
from tests.service.relay import Relay, relaying

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
WAIT_SECONDS = 60


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


@contextlib.asynccontextmanager
async def relayed(offer: Offer | None = None) -> AsyncIterator[tuple[Serving, Relay, FakeGeneration]]:
    """A server, a relay to it, and a generation that runs for a caller behind the relay."""
    async with serve(FakeEngine(), offer) as running:
        running.engine.script = never_end("x")
        assert isinstance(running.address, Address)
        async with relaying(running.address.port) as relay:
            channel = open_channel(Address(host="127.0.0.1", port=relay.port))
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(text_request())
            assert (await call.read()).HasField("started")
            yield running, relay, running.engine.generations[-1]
            call.cancel()
            await channel.close(None)


async def test_a_client_that_is_reset_frees_its_row() -> None:
    async with relayed() as (running, relay, generation):
        relay.reset()
        await asyncio.wait_for(generation.aborted.wait(), WAIT_SECONDS)
        assert generation.abort_reason is AbortReason.DISCONNECTED
        await asyncio.wait_for(running.live.wait_idle(), WAIT_SECONDS)


async def test_a_client_that_has_silently_vanished_is_found_out_and_its_row_is_freed() -> None:
    """Nothing is sent meanwhile, as in a long prompt, so only pings can tell; two are not enough to find it."""
    async with relayed(Offer(keepalive_seconds=2)) as (running, relay, generation):
        await asyncio.sleep(5)
        assert not generation.aborted.is_set()
        relay.freeze()
        await asyncio.wait_for(generation.aborted.wait(), WAIT_SECONDS)
        assert generation.abort_reason is AbortReason.DISCONNECTED
        await asyncio.wait_for(running.live.wait_idle(), WAIT_SECONDS)


async def test_a_client_may_ping_as_often_as_it_likes_while_nothing_is_sent() -> None:
    async with serve(FakeEngine()) as running:
        assert isinstance(running.address, Address)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.address.port)
        writer.write(PREFACE + frame(SETTINGS) + b"".join(frame(PING, bytes([n]) * 8) for n in range(50)))
        seen: Counter[tuple[int, int]] = Counter()
        async with asyncio.timeout(WAIT_SECONDS):
            while seen[PING, 1] < 50:
                kind, flags, _ = await read_frame(reader)
                seen[kind, flags] += 1
                if kind == SETTINGS and not flags:
                    writer.write(frame(SETTINGS, flags=1))
        assert not [kind for kind, _ in seen if kind == GOAWAY]
        writer.close()


def test_every_channel_argument_is_one_that_grpc_knows() -> None:
    """One that it does not know is ignored without a word, such as the name of a ping interval that many copy."""
    core = Path(cygrpc.__file__).read_bytes()
    for key, _ in Offer().channel_options():
        assert key.encode() + b"\0" in core, key
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in core


async def test_channelz_tells_operators_of_connections_when_it_is_asked_for() -> None:
    path = "/grpc.channelz.v1.Channelz/GetServers"
    async with serve(FakeEngine(), Offer(channelz=True)) as running:
        assert await running.channel.unary_unary(path)(b"")
    async with serve(FakeEngine()) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.channel.unary_unary(path)(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_channelz_describes_what_it_lists_and_names_what_is_not_there() -> None:
    async with serve(FakeEngine(), Offer(channelz=True)) as running:

        async def ask(name: str, request: Message, answer: type[Message]) -> Any:
            path = f"/{CHANNELZ_SERVICE.full_name}/{name}"
            return answer.FromString(await running.channel.unary_unary(path)(request.SerializeToString()))

        listed = await ask("GetServers", channelz_pb2.GetServersRequest(), channelz_pb2.GetServersResponse)
        one = channelz_pb2.GetServerRequest(server_id=listed.server[0].ref.server_id)
        described = await ask("GetServer", one, channelz_pb2.GetServerResponse)
        assert described.server.ref == listed.server[0].ref
        nobody = channelz_pb2.GetServerRequest(server_id=10**9)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask("GetServer", nobody, channelz_pb2.GetServerResponse)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert refused.value.details() == "no server named '1000000000'"
        assert reason_of(refused.value) == "NOT_FOUND"


async def test_channelz_tells_of_channels_whatever_its_schema_lacks() -> None:
    """A channel of ours, such as that to a collector of traces, has a field that the library's schema does not know."""
    own = [("grpc.enable_channelz", 1)]
    async with (
        serve(FakeEngine(), Offer(channelz=True)) as running,
        grpc.aio.insecure_channel(str(running.address), options=own) as channel,
    ):
        async with asyncio.timeout(WAIT_SECONDS):
            await channel.channel_ready()
        assert b"maxConnectionsPerSubchannel" in cygrpc.channelz_get_top_channels(0)
        path = f"/{CHANNELZ_SERVICE.full_name}/GetTopChannels"
        listed = channelz_pb2.GetTopChannelsResponse.FromString(await running.channel.unary_unary(path)(b""))
        found = next(one for one in listed.channel if one.data.target.endswith(str(running.address)))
        path = f"/{CHANNELZ_SERVICE.full_name}/GetChannel"
        request = channelz_pb2.GetChannelRequest(channel_id=found.ref.channel_id)
        described = channelz_pb2.GetChannelResponse.FromString(
            await running.channel.unary_unary(path)(request.SerializeToString())
        )
        assert described.channel.data.target == found.data.target


async def test_who_connects_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.offer.HANDSHAKE_SECONDS", 1)
    async with serve(FakeEngine()) as running:
        assert isinstance(running.address, Address)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.address.port)
        async with asyncio.timeout(WAIT_SECONDS):
            while await reader.read(65536):
                pass
        writer.close()
