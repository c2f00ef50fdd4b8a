"""A scripted server for the commands, and a way to run one as a person would."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import click.testing
import pytest

from mlxstream.sync import SyncIteration
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


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Press Ctrl-C when a command has had so many events of its stream, and waits for the next one."""
    real, asked = SyncIteration.__next__, itertools.count()

    def press() -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def arrange(events: int) -> None:
        def following(iteration: SyncIteration[object]) -> object:
            if next(asked) == events:
                threading.Timer(0.05, press).start()
            return real(iteration)

        monkeypatch.setattr(SyncIteration, "__next__", following)

    return arrange
