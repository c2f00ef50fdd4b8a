"""`mlx-stream resume`: go on with a durable generation."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from service.cli.asking import EXIT_INTERRUPTED, answer_flags, connected
from service.cli.credentials import Credentials
from service.cli.durable_notes import hinted, tell_how_to_go_on, told
from service.cli.terminal import Terminal, show_as_json


@click.command()
@click.argument("generation_id")
@click.option("--after", "after_sequence", type=click.IntRange(min=0), default=0, show_default=True,
              metavar="SEQUENCE", help="Number of the last message that was received.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write every event as one line of JSON.")
@answer_flags
def resume(
    generation_id: str,
    after_sequence: int,
    as_json: bool,
    target: str,
    timeout_seconds: float,
    credentials: Credentials,
) -> None:
    """Show what the durable generation GENERATION_ID has said, and go on with it.

    It goes on after Ctrl-C, a lost connection, a crash or a restart of the server. Exit status: as for `generate`.
    """
    terminal = Terminal(sys.stdout, Console(stderr=True))
    with connected(target, timeout_seconds, credentials) as client:
        stream = client.resume(generation_id, after_sequence=after_sequence, durable=told(terminal))
        with hinted(terminal, stream, generation_id):
            if as_json:
                return show_as_json(stream, sys.stdout)
            if terminal.show(stream).interrupted:
                tell_how_to_go_on(terminal, stream, generation_id)
                raise SystemExit(EXIT_INTERRUPTED)
        return None
