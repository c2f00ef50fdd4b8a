"""`mlx-stream demo`: fetch a model, serve it, ask it one question through the client, and stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console

from engine.contracts.errors import EngineError
from mlxstream.client import DEFAULT_TIMEOUT_SECONDS
from service.cli.asking import EXIT_INTERRUPTED, Failure, canvas_view, connected
from service.cli.models import pull_with_bar
from service.cli.terminal import PROGRESS_DELIVERY, Terminal, waiting

DEFAULT_PROMPT = "What is the capital of France? Answer in one sentence."
EXIT_TERMINATED = 143
STOP_SECONDS = 15.0


@click.command()
@click.argument("prompt", default=DEFAULT_PROMPT)
@click.option("--model", default="smollm2-135m", show_default=True, help="What `serve --model` takes.")
@click.option("--show-canvas", is_flag=True, help="Watch a block-diffusion model revise its blocks.")
def demo(prompt: str, model: str, show_canvas: bool) -> None:
    """Start a server on a free port, ask it PROMPT, show the answer as it streams, and stop."""
    console = Console(stderr=True)
    terminal = Terminal(sys.stdout, console)
    delivery = {**PROGRESS_DELIVERY, "draft_blocks": show_canvas}
    signal.signal(signal.SIGTERM, _leave)
    try:
        pull_with_bar(model)
        with serving(model, console) as target, connected(target, DEFAULT_TIMEOUT_SECONDS) as client:
            terminal.note(f"serving {model} on {target}; asking: {prompt}")
            if show_canvas:
                terminal = Terminal(sys.stdout, console, canvas=canvas_view(console, client, model=""))
            answer = terminal.show(client.stream([{"role": "user", "content": prompt}], delivery=delivery))
    except EngineError as error:
        raise Failure(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    if answer.interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


@contextmanager
def serving(model: str, console: Console) -> Iterator[str]:
    """Run `mlx-stream serve` as a child, and give its address once it is ready. It is stopped at the end, always.

    Its standard input is the tether: were this process killed, that pipe would close and end the server.

    Raises:
        Failure: It ended before it was ready; it has said why.
    """
    flags = ["--model", model, "--listen", "127.0.0.1:0", "--log-level", "warning"]
    server = subprocess.Popen(
        [sys.executable, "-m", "service.cli.tethered", "serve", *flags],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        with waiting(console, f"loading {model}"):
            target = _ready_address(server)
        yield target
    finally:
        _stop(server)


def _ready_address(server: subprocess.Popen[str]) -> str:
    """Wait for the line `serving MODEL on HOST:PORT`."""
    for line in server.stdout or ():
        if line.startswith("serving "):
            return line.split()[-1]
    raise Failure(f"the server ended with status {server.wait()} before it was ready")


def _stop(server: subprocess.Popen[str]) -> None:
    try:
        server.terminate()
        server.wait(STOP_SECONDS)
    except BaseException as ended:  # whatever ends the wait, the server does not outlive it
        server.kill()
        server.wait()
        if not isinstance(ended, subprocess.TimeoutExpired):
            raise
    finally:
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exit that runs every clean-up."""
    raise SystemExit(EXIT_TERMINATED)
