"""`mlx-stream generate --durable` and `mlx-stream resume` against a scripted server."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from rich.console import Console

import mlxstream
from mlxstream.v1.generation_pb2 import GenerateRequest
from service.cli import durable_notes
from service.cli.durable_notes import told
from service.cli.terminal import Terminal
from tests.cli.conftest import Run
from tests.clients.python.scripted_server import Context, Events, ThreadedServer, abort, endless


def test_a_durable_answer_reads_like_any_other(run: Run, server: ThreadedServer) -> None:
    result = run("generate", "--durable", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert server.scripted.generations.requests[0].delivery.durable


def test_a_loss_is_told_beside_the_answer_which_goes_on(run: Run, server: ThreadedServer) -> None:
    lives: list[GenerateRequest] = []

    async def lost_once(request: GenerateRequest, context: Context) -> None:
        lives.append(request)
        events = Events(context, tokens=len(lives) - 1)
        await events.start()
        if len(lives) == 1:
            await events.text("Hello")
            await abort(context, grpc.StatusCode.UNAVAILABLE, "gone")
        await events.text(", world")
        await events.finish()

    server.scripted.generations.behaviour = lost_once
    result = run("generate", "--durable", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert result.stderr.startswith("lost after 1 token: the server went away; trying again\nresumed\n")
    (resume,) = server.scripted.generations.resumes
    assert (resume.generation_id, resume.after_sequence) == ("g1", 2)


class Screen(io.StringIO):
    """What a person sees, who has the answer and the notes on one screen."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("said", "seen"),
    [("Hello", "Hello\nlost after 1 token"), ("Hello\n", "Hello\nlost after 1 token"), ("", "the server went away;")],
)
def test_on_a_screen_a_loss_has_a_line_of_its_own(server: ThreadedServer, said: str, seen: str) -> None:
    screen = Screen()
    console = Console(file=screen, force_terminal=True, color_system=None, width=80)

    async def lost_once(request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        if request.delivery.durable:
            await events.progress(1, 3)
            if said:
                await events.text(said)
            await abort(context, grpc.StatusCode.UNAVAILABLE, "gone")
        await events.text(said)
        await events.finish()

    server.scripted.generations.behaviour = lost_once
    terminal = Terminal(screen, console)
    with mlxstream.Client(server.scripted.target) as client:
        terminal.show(client.stream("hi", durable=told(terminal)))
    shown = re.sub(r"\r[^\n]*\x1b\[2K|\x1b\[[0-9;]*m", "", screen.getvalue())
    assert shown.startswith(seen)
    assert "went away" not in shown.partition("resumed\n")[2]


def test_a_server_that_stays_away_is_told_with_the_way_to_go_on(
    run: Run, server: ThreadedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(durable_notes, "Durability", functools.partial(mlxstream.Durability, patience_seconds=0.3))
    lives: list[GenerateRequest] = []

    async def lost_for_good(request: GenerateRequest, context: Context) -> None:
        lives.append(request)
        if len(lives) == 1:
            events = Events(context)
            await events.start()
            await events.text("Hello")
        await abort(context, grpc.StatusCode.UNAVAILABLE, "gone")

    server.scripted.generations.behaviour = lost_for_good
    for arguments in (("generate", "--durable", "hi"), ("generate", "--durable", "--json", "hi"), ("resume", "g1")):
        lives.clear()
        result = run(*arguments)
        assert result.exit_code == 69
        notes = result.stderr.splitlines()
        assert notes[0] == "lost after 1 token: the server went away; trying again"
        assert notes[-2].endswith(f"resume g1 --target {server.scripted.target}`")
        assert notes[-1].startswith("Error: the server at ")
    lives[:] = [GenerateRequest()]
    token = tmp_path / "my token"
    token.write_text("secret")
    result = run("resume", "g7", "--token-file", str(token), "--timeout", "9")
    flags = f"--target {server.scripted.target} --token-file '{token}'"
    assert result.stderr.splitlines()[-2].endswith(f"resume g7 {flags}`")
    lives[:] = [GenerateRequest()]
    result = run("generate", "--durable", "hi")
    assert "resume" not in result.stderr


def test_interrupting_tells_how_to_go_on(
    run: Run, server: ThreadedServer, interrupt_after: Callable[[int], None]
) -> None:
    server.scripted.generations.behaviour = endless
    interrupt_after(3)
    result = run("generate", "--durable", "hi")
    assert result.exit_code == 130
    assert result.stderr.endswith(f"resume g1 --target {server.scripted.target}`\n")


def test_resume_shows_the_whole_of_a_generation(run: Run, server: ThreadedServer) -> None:
    result = run("resume", "g1")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    result = run("resume", "g1", "--after", "7", "--json")
    assert [json.loads(line)["sequence"] for line in result.stdout.splitlines()] == ["1", "2", "3", "4", "5"]
    assert [one.after_sequence for one in server.scripted.generations.resumes] == [0, 7]


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS])
def test_what_cannot_be_resumed_is_one_line(run: Run, server: ThreadedServer, code: grpc.StatusCode) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        await abort(context, code, "no such thing")

    server.scripted.generations.behaviour = refuse
    result = run("resume", "g1")
    assert (result.exit_code, result.stdout) == (2 if code is grpc.StatusCode.NOT_FOUND else 1, "")
    assert result.stderr == "Error: no such thing\n"


def test_resuming_where_no_server_is_does_not_hint_at_the_same_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = functools.partial(mlxstream.Durability, first_patience_seconds=0.0)
    monkeypatch.setattr(durable_notes, "Durability", brief)
    result = run("resume", "xyz", "--target", "127.0.0.1:1")
    assert result.exit_code == 69
    assert "go on with" not in result.stderr
