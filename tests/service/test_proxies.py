"""Behind nginx, HAProxy and Envoy, as `deploy` configures them: streams stay live, and ends mean what they meant.

Each is skipped where it is not installed. Their idle limit is cut to two seconds, so that heartbeats have to beat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import GenerationFailedError
from engine.contracts.results import FinishReason
from mlxstream.v1 import delivery_pb2, generation_pb2_grpc, result_pb2
from tests.ports import free_port
from tests.service.fake_engine import FakeEngine, FakeGeneration, never_end
from tests.service.harness import CLIENT_OPTIONS, Serving, read_all, reason_of, serve, text_request, violated_fields

FILES = Path(__file__).resolve().parents[2] / "deploy"
SEARCH_PATH = os.pathsep.join(
    (str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")
)
START_SECONDS = 60
BEATS = 8  # more than two seconds of them
COMMANDS = {
    "nginx": (
        "proxies/nginx.conf",
        ("-p", "{folder}", "-c", "{file}", "-g", "daemon off; master_process off; pid nginx.pid;"),
    ),
    "haproxy": ("proxies/haproxy.cfg", ("-db", "-f", "{file}")),
    "envoy": ("envoy/envoy.yaml", ("-c", "{file}", "--concurrency", "1", "-l", "error", "--disable-hot-restart")),
}
# What a test must change in the shipped files: addresses, and the idle limit.
ADDRESSES = {
    "nginx": (("127.0.0.1:50051", "127.0.0.1:{upstream}"), ("127.0.0.1:50050", "127.0.0.1:{port}"), ("600s", "2s")),
    "haproxy": (("127.0.0.1:50051", "127.0.0.1:{upstream}"), ("127.0.0.1:50050", "127.0.0.1:{port}"), ("600s", "2s")),
    "envoy": (
        ("port_value: 50051", "port_value: {upstream}"),
        ("port_value: 50052", "port_value: {second}"),
        ("port_value: 50050", "port_value: {port}"),
        ("port_value: 9901", "port_value: 0"),
        ("interval: 2s", "interval: 0.2s"),
        ("stream_idle_timeout: 300s", "stream_idle_timeout: 2s"),
    ),
}


def port_of(serving: Serving) -> int:
    return int(str(serving.address).rpartition(":")[2])


def nginx_scratch(folder: Path) -> str:
    """Folders that nginx makes at its start, where this user may make them."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)


def configured(name: str, folder: Path, *, port: int, upstream: int, second: int | None = None) -> list[str]:
    """The command that runs the proxy with the shipped configuration, but for addresses and the idle limit.

    Where the configuration knows a `second` replica, there is none unless it is given.
    """
    file_name, arguments = COMMANDS[name]
    text = (FILES / file_name).read_text()
    ports = {"port": port, "upstream": upstream, "second": free_port() if second is None else second}
    for shipped, ours in ADDRESSES[name]:
        assert shipped in text, shipped
        text = text.replace(shipped, ours.format(**ports))
    file = folder / Path(file_name).name
    file.write_text(text.replace("http {", f"http {{ {nginx_scratch(folder)}"))
    command = shutil.which(name, path=SEARCH_PATH)
    assert command is not None
    return [command, *(one.format(folder=folder, file=file) for one in arguments)]


async def until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)


@pytest.fixture(params=sorted(COMMANDS))
async def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Serving]:
    """A server, and a channel that reaches it through a proxy."""
    name, port = request.param, free_port()
    if shutil.which(name, path=SEARCH_PATH) is None:
        pytest.skip(f"{name} is not installed")
    async with serve(FakeEngine()) as running:
        running.health.report(None)  # Envoy asks
        command = configured(name, tmp_path, port=port, upstream=port_of(running))
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)  # noqa: ASYNC220 - starts at once
        try:
            await until_open(port, process)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
                yield dataclasses.replace(running, channel=channel)
        finally:
            process.kill()
            process.communicate()


async def test_each_token_comes_before_the_next_one_is_made(proxied: Serving) -> None:
    heard = asyncio.Semaphore(0)

    async def one_at_a_time(generation: FakeGeneration) -> None:
        generation.start()
        for text in ("a", "b", "c"):
            await heard.acquire()
            generation.say(text)
        await heard.acquire()
        generation.end()

    proxied.engine.script = one_at_a_time
    call = generation_pb2_grpc.GenerationServiceStub(proxied.channel).Generate(text_request())
    events = []
    for _ in range(5):
        response = await asyncio.wait_for(call.read(), START_SECONDS)
        events.append(response.chunk.text or response.WhichOneof("event"))
        heard.release()
    assert events == ["started", "a", "b", "c", "finished"]
    assert await call.code() is grpc.StatusCode.OK


async def test_heartbeats_keep_a_long_prompt_alive_beyond_the_proxys_patience(proxied: Serving) -> None:
    read = asyncio.Event()

    async def long_prompt(generation: FakeGeneration) -> None:
        generation.start()
        await read.wait()
        generation.say("late")
        generation.end()

    proxied.engine.script = long_prompt
    delivery = {"heartbeat_interval": {"nanos": 300_000_000}}
    call = proxied.generation.Generate(text_request(delivery=delivery))
    assert (await call.read()).HasField("started")
    for _ in range(BEATS):
        assert (await call.read()).HasField("heartbeat")
    read.set()
    responses, error = await read_all(call)
    assert error is None
    assert "".join(response.chunk.text for response in responses) == "late"


async def test_failures_keep_their_details_before_and_after_tokens(proxied: Serving) -> None:
    _, refused = await read_all(proxied.generation.Generate(text_request(options={"temperature": -1.0})))
    assert refused is not None
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(refused) == ["options.temperature"]

    async def fail(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("a")
        generation.end(FinishReason.ERROR, GenerationFailedError("c-1"))

    proxied.engine.script = fail
    responses, failed = await read_all(proxied.generation.Generate(text_request()))
    assert failed is not None
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert reason_of(failed) == "GENERATION_FAILED"
    assert "".join(response.chunk.text for response in responses) == "a"


async def test_a_cancelled_call_frees_the_row_behind_the_proxy(proxied: Serving) -> None:
    proxied.engine.script = never_end("x")
    call = proxied.generation.Generate(text_request())
    assert (await call.read()).HasField("started")
    call.cancel()
    generation = proxied.engine.generations[-1]
    await asyncio.wait_for(generation.aborted.wait(), START_SECONDS)
    assert generation.abort_reason is AbortReason.DISCONNECTED


async def test_a_deadline_is_known_behind_the_proxy(proxied: Serving, wide_margin: None) -> None:
    proxied.engine.script = never_end("x")
    delivery = {"deadline_policy": delivery_pb2.DEADLINE_POLICY_PARTIAL_RESULT, "heartbeat_interval": {"seconds": 1}}
    responses, error = await read_all(proxied.generation.Generate(text_request(delivery=delivery), timeout=20))
    assert error is None
    assert responses[-1].finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE


async def test_a_prompt_of_five_megabytes_passes(proxied: Serving) -> None:
    _, error = await read_all(proxied.generation.Generate(text_request("x" * 5_000_000)))
    assert error is None
    assert len(proxied.engine.requests[-1].prompt.text) == 5_000_000
