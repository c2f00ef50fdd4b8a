"""A scripted server for the commands, and a way to run one as a person would."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import click.testing
import pytest

from service.cli.main import main
from tests.clients.python.scripted_server import ThreadedServer, answer

Run = Callable[..., click.testing.Result]


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    """A server that greets; set `scripted.generations.behaviour` for anything else."""
    running = ThreadedServer(answer("Hello", ", ", "world"))
    yield running
    running.close()


@pytest.fixture
def run(server: ThreadedServer) -> Run:
    """Run a command against the server; its output and its errors come back apart."""

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> click.testing.Result:
        target = () if "--target" in arguments else ("--target", server.scripted.target)
        return click.testing.CliRunner().invoke(main, [*arguments, *target], input=stdin)

    return invoke


def interrupt_soon(seconds: float = 0.3) -> None:
    """Press Ctrl-C a little later."""
    threading.Timer(seconds, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
