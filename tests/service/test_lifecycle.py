"""One server process: bound before it loads, announced when it is ready, and gone without leaving anyone hanging."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.contracts.errors import MissingArtifactError
from mlxstream.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from service.lifecycle import run_server
from service.settings import ServerSettings
from service.stopping import Signals, StartError
from tests.ports import free_port
from tests.service.fake_engine import FakeEngine, FakeGeneration, never_end
from tests.service.harness import read_all, reason_of, text_request
from tests.waiting import PATIENCE_SECONDS


def settings(tmp_path: Path, **changes: Any) -> ServerSettings:
    values = {"model": "tiny", "listen": f"127.0.0.1:{free_port()}", "state_dir": tmp_path / "state"}
    return ServerSettings(**{**values, "shutdown_grace_seconds": 0.2, "shutdown_late_seconds": 0.0, **changes})


class Running:
    """A server process in this loop."""

    def __init__(self, settings: ServerSettings, engine: FakeEngine) -> None:
        self.engine = engine
        self.signals = Signals()
        self.channel = grpc.aio.insecure_channel(settings.listen, options=(("grpc.use_local_subchannel_pool", 1),))
        self.task = asyncio.ensure_future(run_server(settings, self.signals, engine_class=lambda _: engine))

    def generate(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel).Generate(text_request(), wait_for_ready=True)

    async def health(self) -> int:
        check = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        return int((await check).status)

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 60)


@contextlib.asynccontextmanager
async def running(settings: ServerSettings, engine: FakeEngine | None = None) -> AsyncIterator[Running]:
    process = Running(settings, engine or FakeEngine())
    try:
        yield process
    finally:
        process.signals.ask()
        with contextlib.suppress(StartError):
            await process.ended()
        await process.channel.close()


async def announced(capsys: pytest.CaptureFixture[str]) -> str:
    """The first line on standard output, once it is there."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (text := capsys.readouterr().out):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    return text


async def test_it_announces_the_model_and_the_real_port_when_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running(settings(tmp_path, listen="127.0.0.1:0"), engine):
        await asyncio.sleep(0.1)
        assert capsys.readouterr().out == ""
        engine.load_gate.set()
        line = await announced(capsys)
        found = re.fullmatch(r"serving tiny on 127\.0\.0\.1:(\d+)\n", line)
        assert found is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{found[1]}") as channel:
            answer = await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
            assert answer.model.name == "tiny"


async def test_it_answers_before_the_model_is_loaded(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running(settings(tmp_path), engine) as process:
        assert await process.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        _, error = await read_all(process.generate())
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "UNAVAILABLE"


async def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.load_error = MissingArtifactError("tiny.gguf", "no such file")
    async with running(settings(tmp_path), engine) as process:
        with pytest.raises(StartError) as failure:
            await process.ended()
        assert str(failure.value) == "cannot load the model: tiny.gguf: no such file"
        assert engine.stopped


async def test_a_port_in_use_is_one_line_and_nothing_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        engine = FakeEngine()
        async with running(settings(tmp_path, listen=address), engine) as process:
            with pytest.raises(StartError) as failure:
                await process.ended()
        assert str(failure.value) == f"cannot listen on {address}: the port is in use"
        assert engine.settings is None


async def test_a_second_server_on_the_same_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = settings(tmp_path)
    async with running(first):
        await announced(capsys)
        async with running(settings(tmp_path, listen=first.listen)) as second:
            with pytest.raises(StartError, match="the port is in use"):
                await second.ended()


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("127.0.0.1", "HOST:PORT"),
        ("127.0.0.1:99999", "no port"),
        ("0.0.0.0:0", "--insecure"),
        ("[::]:0", "--insecure"),
        ("example.invalid:0", "--insecure"),
    ],
)
async def test_an_address_that_cannot_be_used_is_one_line(tmp_path: Path, listen: str, message: str) -> None:
    with pytest.raises(StartError, match=message) as failure:
        await run_server(settings(tmp_path, listen=listen), Signals(), engine_class=FakeEngine)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("listen", "message"), [("example.invalid:0", "no such host"), ("192.0.2.1:0", "cannot listen on 192.0.2.1:0")]
)
async def test_an_address_that_is_not_ours_is_one_line(tmp_path: Path, listen: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        await run_server(settings(tmp_path, listen=listen, insecure=True), Signals(), engine_class=FakeEngine)


async def test_a_state_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--state-dir"):
        await run_server(settings(tmp_path, state_dir=tmp_path / "file" / "x"), Signals(), engine_class=FakeEngine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server_cleanly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    async with running(settings(tmp_path, shutdown_grace_seconds=60)) as process:
        process.signals.install()
        await announced(capsys)
        os.kill(os.getpid(), number)
        await process.ended()
        assert process.engine.stopped


async def test_a_signal_while_the_model_loads_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running(settings(tmp_path), engine) as process:
        process.signals.install()
        await process.health()
        os.kill(os.getpid(), signal.SIGTERM)
        await process.ended()
        assert engine.stopped
        assert capsys.readouterr().out == ""


async def test_a_short_stream_may_finish_while_the_server_drains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = asyncio.Event()

    async def short(generation: FakeGeneration) -> None:
        generation.start()
        await release.wait()
        generation.say("done")
        generation.end()

    engine = FakeEngine()
    engine.script = short
    async with running(settings(tmp_path, shutdown_grace_seconds=60), engine) as process:
        await announced(capsys)
        call = process.generate()
        await call.read()
        process.signals.ask()
        while await process.health() == health_pb2.HealthCheckResponse.SERVING:
            pass
        _, refused = await read_all(process.generate())
        assert refused is not None
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        responses, error = await read_all(call)
        assert error is None
        assert responses[-1].WhichOneof("event") == "finished"
        await process.ended()


async def test_a_long_stream_is_unavailable_after_the_grace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.script = never_end("a")
    async with running(settings(tmp_path), engine) as process:
        await announced(capsys)
        call = process.generate()
        await call.read()
        process.signals.ask()
        responses, error = await read_all(call)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert responses[-1].finished.stats.generated_tokens == 1
        await process.ended()


async def test_calls_that_balancers_still_send_are_taken_for_a_moment_after_health_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(settings(tmp_path, shutdown_late_seconds=60, shutdown_grace_seconds=60)) as process:
        await announced(capsys)
        process.signals.ask()
        while await process.health() == health_pb2.HealthCheckResponse.SERVING:
            pass
        responses, error = await read_all(process.generate())
        assert error is None
        assert responses[-1].WhichOneof("event") == "finished"
        process.signals.ask()
        await process.ended()


async def test_a_second_signal_cuts_the_moment_for_late_calls_short_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(settings(tmp_path, shutdown_late_seconds=3600)) as process:
        await announced(capsys)
        process.signals.ask()
        process.signals.ask()
        await process.ended()


async def test_metrics_are_served_at_the_address_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running(settings(tmp_path, metrics_listen=address)) as process:
        await announced(capsys)
        url = f"http://{address}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
        assert "mlx_stream_num_requests_running" in body
        process.signals.ask()
        await process.ended()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))


@pytest.mark.parametrize(("metrics_listen", "message"), [("nowhere", "--metrics-listen"), ("127.0.0.1:1:2", "listen")])
async def test_a_metrics_address_that_is_none_is_one_line(tmp_path: Path, metrics_listen: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        await run_server(settings(tmp_path, metrics_listen=metrics_listen), Signals(), engine_class=FakeEngine)


async def test_a_second_signal_cuts_the_grace_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.script = never_end("a")
    async with running(settings(tmp_path, shutdown_grace_seconds=3600), engine) as process:
        await announced(capsys)
        call = process.generate()
        await call.read()
        process.signals.ask()
        process.signals.ask()
        _, error = await read_all(call)
        assert error is not None
        await process.ended()


async def test_watchers_of_health_see_the_end_and_neither_delay_it_nor_fill_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(settings(tmp_path)) as process:
        await announced(capsys)
        health = health_pb2_grpc.HealthStub(process.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(20)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.signals.ask()
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await watch.read()
            assert failure.value.details() == "the service is shutting down"
        await process.ended()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_a_step_that_never_ends_does_not_keep_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stuck(FakeEngine):
        async def stop(self, hurry: asyncio.Event | None = None) -> None:
            self.stopped = True

    engine = Stuck()
    engine.script = never_end("a")
    async with running(settings(tmp_path), engine) as process:
        await announced(capsys)
        call = process.generate()
        await call.read()
        process.signals.ask()
        await process.ended()
        assert engine.stopped
        _, error = await read_all(call)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("state_bytes", "warned"), [(1, True), (65_535, True), (65_536, False), (None, False)])
async def test_too_little_memory_for_any_request_is_said_at_the_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    state_bytes: int | None,
    warned: bool,
) -> None:
    async with running(settings(tmp_path, state_bytes=state_bytes)):
        await announced(capsys)
    found = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in found] == ["--state-bytes is too small for any request"] * warned
