"""What is shown of a text, and of an account."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

import mlxstream
from service.cli.terminal import Terminal, harmless
from tests.clients.python.scripted_server import Events, ThreadedServer


@pytest.mark.parametrize("text", ["plain\n", "tab\t", "žluťoučký 𠮷", "👩🏽‍🚀", "می‌خواهم", "e\u0301"])
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert harmless(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\r\b\x00\x7f", "\\r\\x08\\x00\\x7f"),
        ("\x85\x9b31m", "\\x85\\x9b31m"),
        ("\u202e\u2066\u2028\ufeff", "\\u202e\\u2066\\u2028\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_could_drive_a_terminal_or_hide_there_is_escaped(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_the_progress_of_a_long_prompt_is_shown_until_the_text_begins(server: ThreadedServer) -> None:
    async def read_then_answer(_request: object, context: object) -> None:
        events = Events(context)
        await events.start(prompt_tokens=900)
        await events.progress(300, 900)
        await events.text("answer")
        await events.progress(900, 900)
        await events.finish()

    server.scripted.generations.behaviour = read_then_answer
    output, shown = io.StringIO(), io.StringIO()
    with mlxstream.Client(server.scripted.target) as client:
        answer = Terminal(output, Console(file=shown, force_terminal=True, width=80)).show(client.stream("x"))
    assert (answer.text, output.getvalue()) == ("answer", "answer\n")
    assert "reading the prompt" in shown.getvalue()
    assert "300/900" in shown.getvalue()
    assert "900/900" not in shown.getvalue()


def test_an_answer_can_be_set_off_by_blank_lines(server: ThreadedServer) -> None:
    output, shown = io.StringIO(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200)
    with mlxstream.Client(server.scripted.target) as client:
        Terminal(output, console, spaced=True).show(client.stream("x"))
    assert output.getvalue() == "\nHello, world\n\n\n"  # the last blank line follows the account, on the console
    assert shown.getvalue().startswith("\x1b[2m3 tokens at 5.0/s")


def test_the_help_page_imports_no_command() -> None:
    code = "import sys, service.cli.main; sys.exit(any(name in sys.modules for name in ('grpc', 'rich', 'mlx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
