"""`mlx-stream top`: watch a server at work, live in the terminal. Asks AdminService alone, and changes nothing."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlxstream import MlxStreamError, UnsupportedError
from mlxstream.v1 import admin_pb2
from service.cli.asking import Failure, connected, explained, is_away, server_flags
from service.cli.credentials import Credentials
from service.cli.terminal import harmless, print_whole
from service.cli.top_screen import History, Snapshot, screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlxstream import Client

ANSWER_SECONDS: Final = 5.0
MOST_GENERATIONS: Final = 1000


@click.command()
@server_flags
@click.option("--interval", "interval_seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
              metavar="SECONDS", help="Time between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look once and end; so it is where standard output is no terminal.")
def top(target: str, interval_seconds: float, once: bool, credentials: Credentials) -> None:
    """Watch generations, rates, memory and the queue of a server; Ctrl-C ends."""
    console = Console()
    with connected(target, ANSWER_SECONDS, credentials) as client:
        watcher = Watcher(client, target)
        try:
            if once or not sys.stdout.isatty():
                print_whole(watcher.look(height=MOST_GENERATIONS), console)
            else:
                _follow(console, watcher, interval_seconds)
        except UnsupportedError:
            raise Failure(
                "the server does not offer AdminService; it is on for local addresses, or with --admin"
            ) from None
        except KeyboardInterrupt:
            return


class Watcher:
    """Asks one server again and again, and draws what it says."""

    def __init__(self, client: Client, target: str) -> None:
        """Nothing is asked yet."""
        self._client = client
        self._target = target
        self._before: Snapshot | None = None
        self._history = History()

    def look(self, *, height: int) -> RenderableType:
        """Ask once.

        Raises:
            MlxStreamError: nobody answers, or the server does not let us look.
        """
        load = self._client.call("AdminService/GetLoad", admin_pb2.GetLoadRequest())
        request = admin_pb2.ListGenerationsRequest(page_size=MOST_GENERATIONS)
        page = self._client.call("AdminService/ListGenerations", request)
        snapshot = Snapshot(at=time.monotonic(), now=time.time(), load=load, generations=list(page.generations))
        self._history.add(load)
        picture = screen(snapshot, self._before, self._history, target=self._target, height=height)
        self._before = snapshot
        return picture


def _follow(console: Console, watcher: Watcher, interval_seconds: float) -> None:
    """Redraw until Ctrl-C; a server that is away for a moment is waited for."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                picture = watcher.look(height=console.height)
            except MlxStreamError as error:
                if not is_away(error):
                    raise
                picture = Text(f"{harmless(explained(error))}; trying again", style="yellow")
            live.update(picture, refresh=True)
            time.sleep(interval_seconds)
