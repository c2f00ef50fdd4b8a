"""`mlx-stream top`: watch a server at work, live in the terminal. Asks AdminService alone, and changes nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlxstream.client import DEFAULT_TARGET
from mlxstream.connection import checked_target
from mlxstream.v1 import admin_pb2, admin_pb2_grpc
from service.cli.asking import Failure, Unreachable
from service.cli.terminal import harmless
from service.cli.top_screen import History, Snapshot, screen

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWER_SECONDS: Final = 5.0
MOST_GENERATIONS: Final = 1000
# Why a server does not answer now, and may in a moment.
PASSING: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@click.command()
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="HOST:PORT or unix:PATH of the server.")
@click.option("--interval", "interval_seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
              metavar="SECONDS", help="Time between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look once and end; so it is where standard output is no terminal.")
@click.option("--ca", "ca_file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Certificates to trust; encrypts the connection.")  # fmt: skip
@click.option("--token-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="File that holds an operator's token.")  # fmt: skip
def top(target: str, interval_seconds: float, once: bool, ca_file: Path | None, token_file: Path | None) -> None:
    """Watch generations, rates, memory and the queue of a server; Ctrl-C ends."""
    try:
        target = checked_target(target)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = Console()
    with _channel(target, ca_file) as channel:
        watcher = Watcher(channel, target, _metadata(token_file))
        if once or not sys.stdout.isatty():
            console.print(watcher.look(height=MOST_GENERATIONS))
            return
        try:
            _follow(console, watcher, interval_seconds)
        except KeyboardInterrupt:
            return


class Watcher:
    """Asks one server again and again, and draws what it says."""

    def __init__(self, channel: grpc.Channel, target: str, metadata: tuple[tuple[str, str], ...]) -> None:
        """Nothing is asked yet."""
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._target = target
        self._metadata = metadata
        self._before: Snapshot | None = None
        self._history = History()

    def look(self, *, height: int) -> RenderableType:
        """Ask once.

        Raises:
            Unreachable: nobody answers.
            Failure: the server does not let us look.
        """
        try:
            snapshot = self._snapshot()
        except grpc.RpcError as error:
            raise _failure(error, self._target) from None
        self._history.add(snapshot.load)
        picture = screen(snapshot, self._before, self._history, target=self._target, height=height)
        self._before = snapshot
        return picture

    def _snapshot(self) -> Snapshot:
        load = self._admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=ANSWER_SECONDS, metadata=self._metadata)
        request = admin_pb2.ListGenerationsRequest(page_size=MOST_GENERATIONS)
        page = self._admin.ListGenerations(request, timeout=ANSWER_SECONDS, metadata=self._metadata)
        return Snapshot(at=time.monotonic(), now=time.time(), load=load, generations=list(page.generations))


def _follow(console: Console, watcher: Watcher, interval_seconds: float) -> None:
    """Redraw until Ctrl-C; a server that is away for a moment is waited for."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                picture = watcher.look(height=console.height)
            except Unreachable as error:
                picture = Text(f"{error.message}; trying again", style="yellow")
            live.update(picture, refresh=True)
            time.sleep(interval_seconds)


def _failure(error: grpc.RpcError, target: str) -> Failure:
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    if code in PASSING:
        return Unreachable(f"no answer from {harmless(target)}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Failure("the server does not offer AdminService; it is on for loopback addresses, or when asked for")
    details = error.details() if isinstance(error, grpc.Call) else ""
    return Failure(harmless(details or code.name))


def _channel(target: str, ca_file: Path | None) -> grpc.Channel:
    if ca_file is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca_file.read_bytes()))


def _metadata(token_file: Path | None) -> tuple[tuple[str, str], ...]:
    return () if token_file is None else (("authorization", f"Bearer {token_file.read_text().strip()}"),)
