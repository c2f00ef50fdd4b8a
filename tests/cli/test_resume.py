"""`mlx-stream generate --durable` and `mlx-stream resume` against a scripted server."""

from __future__ import annotations

import json

import grpc
import pytest

from mlxstream.v1.generation_pb2 import GenerateRequest
from tests.cli.conftest import Run, interrupt_soon
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
    assert "lost after 1 token" in result.stderr
    assert "resumed at try 1" in result.stderr
    (resume,) = server.scripted.generations.resumes
    assert (resume.generation_id, resume.after_sequence) == ("g1", 2)


def test_interrupting_tells_how_to_go_on(run: Run, server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = endless
    interrupt_soon()
    result = run("generate", "--durable", "hi")
    assert result.exit_code == 130
    assert "resume g1`" in " ".join(result.stderr.split())


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
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: no such thing\n"
