"""Ten thousand requests that no client would send, and bytes that are no gRPC at all: told, and survived."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from mlxstream.v1 import admin_pb2
from service.channelz import CHANNELZ_SERVICE
from service.health import HEALTH_SERVICE
from service.offer import ADMIN_SERVICE, GENERATION_SERVICE, MODEL_SERVICE, Offer
from service.tls import Tls, TlsFiles
from service.unix_socket import UnixAddress
from tests.certificates import Authority
from tests.service.fake_engine import FakeEngine
from tests.service.fuzzed_calls import send_fuzzed
from tests.service.harness import Serving, read_all, serve, text_request

CODE = grpc.StatusCode
REQUESTS = 10_000
MUTANTS_OF_EACH = 24
# Every method that ends by itself, of every service that takes one message.
METHODS: list[MethodDescriptor] = [
    *GENERATION_SERVICE.methods,
    *MODEL_SERVICE.methods,
    *ADMIN_SERVICE.methods,
    *(method for method in HEALTH_SERVICE.methods if not method.server_streaming),
    *CHANNELZ_SERVICE.methods,
]
# What a caller's own mistake may be told as. Neither UNKNOWN nor INTERNAL is among them.
ALLOWED = {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.ALREADY_EXISTS, CODE.UNIMPLEMENTED, CODE.OUT_OF_RANGE}


@pytest.fixture
async def open_to_all() -> AsyncIterator[Serving]:
    """A server that offers everything."""
    async with serve(FakeEngine(), Offer(channelz=True)) as running:
        yield running


@pytest.fixture
async def drained() -> AsyncIterator[Serving]:
    """A server of its own for `Drain`, after which nothing else would be heard."""
    async with serve(FakeEngine()) as running:
        yield running


@pytest.mark.timeout(600)
async def test_ten_thousand_malformed_requests_are_told_apart_and_survived(
    open_to_all: Serving, drained: Serving
) -> None:
    """Hypothesis makes messages, a seeded hand damages them, and the whole stack answers."""
    tasks_before = len(asyncio.all_tasks())
    seen = await send_fuzzed(
        METHODS,
        lambda method: (drained if method.name == "Drain" else open_to_all).channel,
        requests=REQUESTS,
        mutants_of_each=MUTANTS_OF_EACH,
    )
    assert seen.total() >= REQUESTS
    assert {name for name, _ in seen} == {method.name for method in METHODS}
    assert {code for _, code in seen} <= ALLOWED, seen
    by_code = {code: sum(count for (_, one), count in seen.items() if one is code) for code in ALLOWED}
    assert by_code[CODE.OK] > 100
    assert by_code[CODE.INVALID_ARGUMENT] > 1000
    await open_to_all.live.wait_idle()
    assert len(asyncio.all_tasks()) == tasks_before
    assert (await read_all(open_to_all.generation.Generate(text_request())))[1] is None
    assert seen["Drain", CODE.OK] > 0
    assert drained.live.is_draining
    assert (await drained.admin.GetLoad(admin_pb2.GetLoadRequest())).draining


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NOISE = {
    "nothing": b"",
    "http/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    "half a preface": PREFACE[:10],
    "a frame of 16 MiB": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "headers that are none": PREFACE + SETTINGS + b"\x00\x00\x10\x01\x05\x00\x00\x00\x01" + b"\xff" * 16,
    "a continuation of nothing": PREFACE + SETTINGS + b"\x00\x00\x04\x09\x04\x00\x00\x00\x01abcd",
    "data before headers": PREFACE + SETTINGS + b"\x00\x00\x04\x00\x01\x00\x00\x00\x01abcd",
}


async def poke(port: int, noise: bytes) -> None:
    """Say `noise` to the port, listen for a moment, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(noise)
        await writer.drain()
        async with asyncio.timeout(0.05):
            await reader.read(65536)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_bytes_that_are_no_grpc_disturb_nobody(encrypted: bool, authority: Authority) -> None:
    leaf = authority.issue("noise")
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key)) if encrypted else None
    credentials = authority.client_credentials() if encrypted else None
    rng = random.Random(7)
    noises = [*NOISE.values(), *(rng.randbytes(rng.randint(1, 3000)) for _ in range(50))]
    noises += [PREFACE + SETTINGS + rng.randbytes(200) for _ in range(20)]
    async with serve(FakeEngine(), tls=tls, credentials=credentials) as running:
        port = int(str(running.address).rpartition(":")[2])
        for start in range(0, len(noises), 20):
            await asyncio.gather(*(poke(port, noise) for noise in noises[start : start + 20]))
            _, error = await read_all(running.generation.Generate(text_request()))
            assert error is None
        assert running.live.count == 0


async def test_bytes_that_are_no_grpc_disturb_nobody_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with serve(FakeEngine(), at=UnixAddress(path=path)) as running:
        for noise in NOISE.values():
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(noise)
            writer.close()
        assert (await read_all(running.generation.Generate(text_request())))[1] is None
