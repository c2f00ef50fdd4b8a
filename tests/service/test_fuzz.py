"""Ten thousand requests that no client would send, and bytes that are no gRPC at all: told, and survived."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings, strategies

from service.offer import GENERATION_SERVICE, MODEL_SERVICE
from service.tls import Tls, TlsFiles
from service.unix_socket import UnixAddress
from tests.certificates import Authority
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Serving, details_of, read_all, serve, text_request
from tests.service.message_fuzzer import messages, mutated

CODE = grpc.StatusCode
REQUESTS = 10_000
MUTANTS_OF_EACH = 24
AT_ONCE = 64
CALL_SECONDS = 30
METHODS: list[MethodDescriptor] = [*GENERATION_SERVICE.methods, *MODEL_SERVICE.methods]
# What a caller's own mistake may be told as. Neither UNKNOWN nor INTERNAL is among them.
ALLOWED = {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.ALREADY_EXISTS, CODE.UNIMPLEMENTED, CODE.OUT_OF_RANGE}


async def outcome(serving: Serving, method: MethodDescriptor, request_bytes: bytes) -> grpc.StatusCode:
    """How one raw call ends; a failure must bring its details."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            call = serving.channel.unary_stream(path)(request_bytes, timeout=CALL_SECONDS)
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await serving.channel.unary_unary(path)(request_bytes, timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        if not details_of(error):
            raise AssertionError(f"{error} has no details") from error
        return error.code()
    return CODE.OK


async def all_outcomes(serving: Serving, calls: list[tuple[MethodDescriptor, bytes]]) -> Counter[grpc.StatusCode]:
    return Counter(await asyncio.gather(*(outcome(serving, *one) for one in calls)))


async def test_ten_thousand_malformed_requests_are_told_apart_and_survived(serving: Serving) -> None:
    """Hypothesis makes messages, a seeded hand damages them, and the whole stack answers."""
    loop, tasks_before = asyncio.get_running_loop(), len(asyncio.all_tasks())
    seen: Counter[grpc.StatusCode] = Counter()
    calls: list[tuple[MethodDescriptor, bytes]] = []

    def send() -> None:
        future = asyncio.run_coroutine_threadsafe(all_outcomes(serving, calls), loop)
        seen.update(future.result(10 * CALL_SECONDS))
        calls.clear()

    @settings(
        max_examples=REQUESTS // (MUTANTS_OF_EACH + 1) + 1,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=strategies.data(), method=strategies.sampled_from(METHODS), seed=strategies.integers(0, 2**32))
    def fuzz(data: Any, method: MethodDescriptor, seed: int) -> None:
        encoded = data.draw(messages(method.input_type)).SerializeToString()
        rng = random.Random(seed)
        calls.append((method, encoded))
        calls.extend((method, mutated(encoded, rng)) for _ in range(MUTANTS_OF_EACH))
        if len(calls) >= AT_ONCE:
            send()

    await asyncio.to_thread(fuzz)
    seen.update(await all_outcomes(serving, calls))
    assert seen.total() >= REQUESTS
    assert set(seen) <= ALLOWED, seen
    assert seen[CODE.OK] > 100
    assert seen[CODE.INVALID_ARGUMENT] > 1000
    await serving.live.wait_idle()
    assert len(asyncio.all_tasks()) == tasks_before
    assert (await read_all(serving.generation.Generate(text_request())))[1] is None


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
