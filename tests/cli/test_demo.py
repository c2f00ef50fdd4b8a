"""`mlx-stream demo`: the whole product once, and a server that never outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from benchmarks.tales.corpus import tales
from service.cli.main import main
from tests.clients.python.scripted_server import ThreadedServer, endless

DEMO = [sys.executable, "-m", "service.cli", "demo"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}


def has_ended(target: str) -> bool:
    """Whether nobody listens at `HOST:PORT` any more."""
    host, port = target.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def test_the_demo_answers_with_the_real_model_and_stops_its_server(demo_model_path: Path) -> None:
    question = "What is the capital of France?"
    ended = subprocess.run([*DEMO, question], capture_output=True, text=True, check=False, env=environment())
    assert (ended.returncode, ended.stdout) == (0, "The capital of France is Paris.\n")
    serving = re.search(r"serving smollm2-135m on (\S+); asking: What is the capital", ended.stderr)
    assert serving is not None
    assert has_ended(serving.group(1))
    assert "8 tokens at " in ended.stderr


def test_the_demo_of_block_diffusion_tells_a_tale_in_whole_blocks() -> None:
    model = Path(__file__).resolve().parents[2] / "benchmarks" / "tales" / "model"
    command = [
        *DEMO,
        "--model",
        str(model),
        "--show-canvas",
        "--",
        "Once there was a clever fox who lived in the wood.",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert ended.returncode == 0, ended.stderr
    words, known = ended.stdout.split(), set(" ".join(tales(400, seed=1)).split())
    assert len(words) > 15
    assert sum(word in known for word in words) > 0.8 * len(words)
    assert " blocks in " in ended.stderr or " block in " in ended.stderr


@contextlib.contextmanager
def telling_a_long_story() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo whose server is up, and its target; in the end both are gone, for they share what is read then."""
    demo = subprocess.Popen(
        [*DEMO, "Write a very long story."],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert demo.stderr is not None
    with demo:
        target = next(match.group(1) for line in demo.stderr if (match := re.search(r"serving \S+ on (\S+);", line)))
        yield demo, target
        demo.stderr.read()


def test_a_demo_that_is_terminated_stops_its_server(demo_model_path: Path) -> None:
    with telling_a_long_story() as (demo, target):
        assert not has_ended(target)
        demo.send_signal(signal.SIGTERM)
    assert demo.returncode == 143
    assert has_ended(target)


def test_a_demo_that_is_killed_takes_its_server_along(demo_model_path: Path) -> None:
    with telling_a_long_story() as (demo, target):
        demo.kill()
    assert demo.returncode == -signal.SIGKILL
    assert has_ended(target)


INTERRUPTING_SERVER = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
print("serving m on TARGET", flush=True)
time.sleep(120)
time.sleep(120)
"""


def test_interrupting_while_the_server_stops_ends_both_with_the_status_of_an_interruption(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, start, started = INTERRUPTING_SERVER.replace("TARGET", server.scripted.target), subprocess.Popen, []

    def start_stubborn(_command: list[str], **pipes: Any) -> subprocess.Popen[str]:
        started.append(start([sys.executable, "-c", code], **pipes))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_stubborn)
    monkeypatch.setattr("service.cli.demo.pull_with_bar", lambda _model: None)
    result = click.testing.CliRunner().invoke(main, ["demo", "hi", "--model", "m"])
    assert (result.exit_code, result.stdout) == (130, "Hello, world\n")
    assert "Aborted" not in result.stderr
    assert [one.returncode for one in started] == [-signal.SIGKILL]


def test_a_tethered_command_ends_when_its_standard_input_closes(server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = endless
    command = [sys.executable, "-m", "service.cli.tethered", "generate", "hi", "--target", server.scripted.target]
    tethered = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    )
    assert tethered.stdin is not None
    assert tethered.stdout is not None
    with tethered:
        assert tethered.stdout.read(10) == b"more more "
        tethered.stdin.close()
    assert tethered.returncode == -signal.SIGTERM


def test_a_model_that_is_nowhere_is_one_clear_line() -> None:
    result = click.testing.CliRunner().invoke(main, ["demo", "--model", "./nowhere.gguf"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nowhere.gguf" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_server_that_cannot_load_says_why_and_the_demo_says_that_it_ended(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    ended = subprocess.run(
        [*DEMO, "--model", str(broken)], capture_output=True, text=True, check=False, env=environment()
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "broken.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Error: the server ended with status 1 before it was ready" in ended.stderr
