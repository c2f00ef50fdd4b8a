"""The server as a process, with the real engine on a tiny model: what an operator and a caller see of its life."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mlxstream.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import Authority
from tests.engine import tiny_model
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(folder, max_position_embeddings=100_000)
    return folder


class Process:
    """One `mlx-stream serve`."""

    def __init__(self, model: Path, tmp_path: Path, *more: str, listen: str = "127.0.0.1:0") -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MLX_STREAM_", "GRPC_"))
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")])
        flags = ["--model", str(model), "--listen", listen, "--state-dir", str(tmp_path / "state"), "--device", "cpu"]
        flags += ["--log-level", "warning", "--shutdown-grace-seconds", "0.2", *more]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "service.cli",
                "serve",
                *flags,
                "--log-level",
                "warning",
                "--shutdown-grace-seconds",
                "0.2",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
        )

    def announced(self) -> str:
        """The address of the line that says that it is ready."""
        assert self.process.stdout is not None
        found = re.fullmatch(r"serving tiny on (127\.0\.0\.1:\d+)\n", self.process.stdout.readline())
        assert found is not None
        return found[1]

    def ended(self) -> tuple[int, str, str]:
        """Its exit status and the rest of what it said."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[type]:
    started: list[Process] = []

    def start(folder: Path = model, *flags: str, **more: str) -> Process:
        started.append(Process(folder, tmp_path, *flags, **more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def generate(address: str, **options: object) -> tuple[grpc.Channel, Iterator[generation_pb2.GenerateResponse]]:
    channel = grpc.insecure_channel(address)
    request = generation_pb2.GenerateRequest(tokens={"ids": [1, 2, 3]}, options=options)
    return channel, generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


def test_it_streams_and_ends_cleanly_on_sigterm(serve: type) -> None:
    server = serve()
    channel, stream = generate(server.announced(), max_tokens=5, eos_token_ids={})
    with channel:
        events = [response.WhichOneof("event") for response in stream]
    assert (events[0], events[-1]) == ("started", "finished")
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == (0, "", "")


def test_who_connects_badly_writes_nothing_into_the_log(serve: type, model: Path, authority: Authority) -> None:
    leaf = authority.issue("quiet")
    server = serve(model, "--tls-cert", str(leaf.certificate), "--tls-key", str(leaf.key), "--log-format", "json")
    host, port = server.announced().split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.settimeout(20)
        while connection.recv(1024):
            pass
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == (0, "", "")


def test_a_stream_that_runs_at_sigint_is_told_and_the_exit_is_clean(serve: type) -> None:
    server = serve()
    channel, stream = generate(server.announced(), max_tokens=90_000, eos_token_ids={})
    with channel:
        assert next(stream).WhichOneof("event") == "started"
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as failure:
            list(stream)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.ended()[0] == 0


def test_a_killed_server_never_looks_like_a_clean_end(serve: type) -> None:
    server = serve()
    channel, stream = generate(server.announced(), max_tokens=90_000, eos_token_ids={})
    with channel:
        assert next(stream).WhichOneof("event") == "started"
        server.process.kill()
        with pytest.raises(grpc.RpcError) as failure:
            list(stream)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def test_sigterm_while_it_loads_ends_promptly(serve: type) -> None:
    address = ("127.0.0.1", free_port())
    server = serve(listen=f"127.0.0.1:{address[1]}")
    while server.process.poll() is None:
        with socket.socket() as attempt:
            if attempt.connect_ex(address) == 0:
                break
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    status, _, err = server.ended()
    assert (status, err) == (0, "")


@pytest.mark.parametrize("harm", ["missing", "truncated", "empty folder"])
def test_a_model_that_cannot_be_loaded_is_an_exit_status_and_one_line(serve: type, tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "tiny"
    if harm == "empty folder":
        folder.mkdir()
    elif harm == "truncated":
        tiny_model.write(folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    server = serve(folder)
    status, out, err = server.ended()
    assert status == 1
    assert out == ""
    assert err.startswith("mlx-stream serve: cannot load the model: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_second_server_on_the_port_exits_with_one_line(serve: type) -> None:
    address = serve().announced()
    status, out, err = serve(listen=address).ended()
    assert (status, out) == (1, "")
    assert err == f"mlx-stream serve: cannot listen on {address}: the port is in use\n"
