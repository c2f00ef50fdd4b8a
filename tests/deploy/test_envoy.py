"""Two replicas behind a real Envoy, as `deploy/envoy` configures it. Skipped where Envoy is not installed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from service.metadata import SESSION_KEY
from tests.ports import free_port
from tests.service.fake_engine import FakeEngine, FakeGeneration
from tests.service.harness import CLIENT_OPTIONS, Serving, read_all, serve, text_request
from tests.service.test_proxies import SEARCH_PATH, configured, port_of, until_open

SESSIONS = 40


@dataclass
class Balanced:
    """Two replicas, and a channel to Envoy in front of them."""

    replicas: tuple[Serving, Serving]
    channel: grpc.aio.Channel
    port: int

    async def ask(self, session: str = "") -> grpc.StatusCode:
        metadata = ((SESSION_KEY, session),) if session else ()
        call = generation_pb2_grpc.GenerationServiceStub(self.channel).Generate(text_request(), metadata=metadata)
        _, error = await read_all(call)
        return grpc.StatusCode.OK if error is None else error.code()

    def asked(self) -> list[int]:
        """How many requests each replica has had."""
        return [len(replica.engine.requests) for replica in self.replicas]

    async def until_both_are_known(self) -> None:
        async with asyncio.timeout(60):
            number = 0
            while not all(self.asked()):
                number += 1
                await self.ask(f"warm-up {number}")


@pytest.fixture
async def balanced(tmp_path: Path) -> AsyncIterator[Balanced]:
    if shutil.which("envoy", path=SEARCH_PATH) is None:
        pytest.skip("envoy is not installed")
    port = free_port()
    async with serve(FakeEngine()) as one, serve(FakeEngine()) as two:
        for replica in (one, two):
            replica.health.report(None)
        command = configured("envoy", tmp_path, port=port, upstream=port_of(one), second=port_of(two))
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)  # noqa: ASYNC220 - starts at once
        try:
            await until_open(port, process)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
                found = Balanced((one, two), channel, port)
                await found.until_both_are_known()
                yield found
        finally:
            process.kill()
            process.communicate()


async def test_a_session_stays_with_its_replica_and_sessions_are_spread(balanced: Balanced) -> None:
    used = []
    for number in range(SESSIONS):
        before = balanced.asked()
        for _ in range(3):
            assert await balanced.ask(f"session-{number}") is grpc.StatusCode.OK
        gained = [now - then for now, then in zip(balanced.asked(), before, strict=True)]
        assert sorted(gained) == [0, 3]
        used.append(gained.index(3))
    assert min(used.count(0), used.count(1)) > SESSIONS / 10


async def test_a_replica_that_drains_gets_no_calls_and_finishes_its_streams(balanced: Balanced) -> None:
    release = asyncio.Event()

    async def until_released(generation: FakeGeneration) -> None:
        generation.start()
        await release.wait()
        generation.say("done")
        generation.end()

    for replica in balanced.replicas:
        replica.engine.script = until_released
    stub = generation_pb2_grpc.GenerationServiceStub(balanced.channel)
    running = stub.Generate(text_request(), metadata=((SESSION_KEY, "one"),))
    assert (await running.read()).HasField("started")
    leaving, staying = sorted(balanced.replicas, key=lambda replica: replica.live.count, reverse=True)
    leaving.health.drain()
    release.set()
    async with asyncio.timeout(60):
        seen = None
        while seen != len(leaving.engine.requests):  # until a whole round of calls goes elsewhere
            seen = len(leaving.engine.requests)
            await asyncio.sleep(0.5)
            for number in range(10):
                await balanced.ask(f"session-{number}")
    before = len(staying.engine.requests)
    for number in range(10):
        assert await balanced.ask(f"another-{number}") is grpc.StatusCode.OK
    assert len(staying.engine.requests) == before + 10
    responses, error = await read_all(running)
    assert error is None
    assert responses[-1].HasField("finished")


async def test_operators_calls_do_not_pass(balanced: Balanced) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await admin_pb2_grpc.AdminServiceStub(balanced.channel).GetLoad(admin_pb2.GetLoadRequest())
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_browser_is_answered_by_grpc_web(balanced: Balanced) -> None:
    message = generation_pb2.CompleteRequest(text={"text": "hi"}).SerializeToString()
    request = urllib.request.Request(
        f"http://127.0.0.1:{balanced.port}/mlxstream.v1.GenerationService/Complete",
        data=b"\0" + len(message).to_bytes(4, "big") + message,
        headers={"content-type": "application/grpc-web+proto", "x-grpc-web": "1"},
    )

    def asked() -> bytes:
        with contextlib.closing(urllib.request.urlopen(request, timeout=60)) as response:
            return bytes(response.read())

    body = await asyncio.to_thread(asked)
    length = int.from_bytes(body[1:5], "big")
    assert body[0] == 0
    assert generation_pb2.CompleteResponse.FromString(body[5 : 5 + length]).text == "Hello!"
    assert body[5 + length] == 0x80
    assert b"grpc-status:0" in body[5 + length :].replace(b" ", b"")
