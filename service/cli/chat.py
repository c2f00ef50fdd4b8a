"""`mlx-stream chat`: a conversation that remembers its turns."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click
from rich.console import Console

from mlxstream import Client, MlxStreamError
from service.cli.asking import connected, connection_flags, explained, is_away
from service.cli.credentials import Credentials
from service.cli.option_flags import option_flags, set_options
from service.cli.terminal import PROGRESS_DELIVERY, Terminal, harmless

HELP = (
    "/reset forgets the conversation, /retry asks again what got no answer, /exit or Ctrl-D leaves, "
    "Ctrl-C cancels an answer"
)
LEAVING = "Ctrl-D or /exit leaves"


@click.command()
@click.option("--system", help="What the model is told before the first turn.")
@option_flags
@connection_flags
def chat(
    system: str | None, target: str, model: str, timeout_seconds: float, credentials: Credentials, **options: Any
) -> None:
    """Talk with a model, turn by turn.

    Ctrl-C cancels the answer that is being written; what was written of it stays in the conversation.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input(), where it exists
    terminal = Terminal(sys.stdout, Console(stderr=True), spaced=_is_interactive())
    with connected(target, timeout_seconds, credentials) as client:
        terminal.note(f"{client.model(model).name} at {target}. {HELP}.")
        Conversation(client, terminal, system, {"model": model, **set_options(options)}).run()


def _is_interactive() -> bool:
    """Whether a person types and reads here."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, client: Client, terminal: Terminal, system: str | None, arguments: dict[str, Any]) -> None:
        self._client = client
        self._terminal = terminal
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._turns: list[dict[str, str]] = []
        self._arguments = arguments
        self._unanswered: str | None = None
        self._told_how_to_leave = False

    def run(self) -> None:
        """Read and answer lines until the end of input."""
        while (line := self._read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._turns.clear()
                self._unanswered = None
                self._terminal.note("forgotten")
            elif line == "/retry":
                self._retry()
            elif line.startswith("/"):
                self._terminal.note(f"unknown command {harmless(line.split()[0])}: {HELP}")
            elif line:
                self._answer(line)

    def _read_line(self) -> str | None:
        """The next line without blanks around it; None at the end of input."""
        prompt = "> " if _is_interactive() else ""
        try:
            return input(prompt).strip()
        except EOFError:
            if prompt:
                sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if not self._told_how_to_leave:
                self._told_how_to_leave = True
                self._terminal.note(LEAVING)
            return ""

    def _retry(self) -> None:
        if self._unanswered is None:
            self._terminal.note("every question has its answer")
        else:
            self._answer(self._unanswered)

    def _answer(self, line: str) -> None:
        """Ask with all turns so far. A turn that got no answer is set aside for `/retry`, so that the next can follow.

        A server that went away ends no conversation: it may come back, and the turns are kept here.
        """
        asked = [*self._turns, {"role": "user", "content": line}]
        stream = self._client.stream([*self._opening, *asked], delivery=PROGRESS_DELIVERY, **self._arguments)
        self._unanswered = line
        try:
            answer = self._terminal.show(stream)
        except MlxStreamError as error:
            kept = ". The conversation is kept; /retry asks again" if is_away(error) else ""
            self._terminal.note(explained(error) + kept)
            return
        if answer.text or not answer.interrupted:
            self._turns = [*asked, {"role": "assistant", "content": answer.text}]
            self._unanswered = None
