"""`mlx-stream chat`: a conversation that remembers its turns."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click
from rich.console import Console

from mlxstream import Client, MlxStreamError
from service.cli.asking import connected, connection_flags, explained, is_unreachable, option_flags, set_options
from service.cli.terminal import PROGRESS_DELIVERY, Terminal

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C cancels an answer"


@click.command()
@click.option("--system", help="What the model is told before the first turn.")
@option_flags
@connection_flags
def chat(system: str | None, target: str, model: str, timeout_seconds: float, **options: Any) -> None:
    """Talk with a model, turn by turn.

    Ctrl-C cancels the answer that is being written; what was written of it stays in the conversation.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input(), where it exists
    terminal = Terminal(sys.stdout, Console(stderr=True))
    with connected(target, timeout_seconds) as client:
        terminal.note(f"{client.model(model).name} at {target}. {HELP}.")
        Conversation(client, terminal, target, system, {"model": model, **set_options(options)}).run()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(
        self, client: Client, terminal: Terminal, target: str, system: str | None, arguments: dict[str, Any]
    ) -> None:
        self._client = client
        self._terminal = terminal
        self._target = target
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._turns: list[dict[str, str]] = []
        self._arguments = arguments

    def run(self) -> None:
        """Read and answer lines until the end of input."""
        while (line := self._read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._turns.clear()
                self._terminal.note("forgotten")
            elif line.startswith("/"):
                self._terminal.note(HELP)
            elif line:
                self._answer(line)

    def _read_line(self) -> str | None:
        """The next line without blanks around it; None at the end of input."""
        prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        try:
            return input(prompt).strip()
        except EOFError:
            if prompt:
                sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self._terminal.note(HELP)
            return ""

    def _answer(self, line: str) -> None:
        """Ask with all turns so far. A turn that got no answer is taken back, so that the next one can follow."""
        asked = [*self._turns, {"role": "user", "content": line}]
        stream = self._client.stream([*self._opening, *asked], delivery=PROGRESS_DELIVERY, **self._arguments)
        try:
            answer = self._terminal.show(stream)
        except MlxStreamError as error:
            if is_unreachable(error):
                raise
            self._terminal.note(explained(error, self._target))
            return
        if answer.text or not answer.interrupted:
            self._turns = [*asked, {"role": "assistant", "content": answer.text}]
