"""`mlx-stream chat` against a scripted server."""

from __future__ import annotations

import grpc
from google.rpc.error_details_pb2 import ErrorInfo

from mlxstream.v1.generation_pb2 import GenerateRequest
from tests.cli.conftest import Run, interrupt_soon
from tests.clients.python.scripted_server import Context, Events, ThreadedServer, abort, answer, endless


def turns(request: GenerateRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.content[0].text) for turn in request.chat.messages]


def test_every_turn_is_asked_with_what_came_before(run: Run, server: ThreadedServer) -> None:
    result = run("chat", "--system", "Be brief.", "--max-tokens", "9", stdin="one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\nHello, world\n")
    first, second = server.scripted.generations.requests
    assert turns(first) == [("system", "Be brief."), ("user", "one")]
    assert turns(second) == [*turns(first), ("assistant", "Hello, world"), ("user", "two")]
    assert second.options.max_tokens == 9


def test_reset_forgets_the_turns_but_not_the_system_text(run: Run, server: ThreadedServer) -> None:
    result = run("chat", "--system", "Be brief.", stdin="one\n/reset\ntwo\n")
    assert "forgotten" in result.stderr
    assert turns(server.scripted.generations.requests[-1]) == [("system", "Be brief."), ("user", "two")]


def test_exit_leaves_and_another_command_is_explained(run: Run, server: ThreadedServer) -> None:
    result = run("chat", stdin="/what\n/exit\nnever asked\n")
    assert result.exit_code == 0
    assert result.stderr.count("/reset forgets") == 2
    assert server.scripted.generations.requests == []


def test_a_cancelled_answer_keeps_what_was_written_and_the_chat_goes_on(run: Run, server: ThreadedServer) -> None:
    async def endless_at_first(request: GenerateRequest, context: Context) -> None:
        await (endless if len(server.scripted.generations.requests) == 1 else answer("fine"))(request, context)

    server.scripted.generations.behaviour = endless_at_first
    interrupt_soon()
    result = run("chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert "cancelled after " in result.stderr
    user, assistant, following = turns(server.scripted.generations.requests[-1])
    assert (user, following) == (("user", "one"), ("user", "two"))
    assert assistant[0] == "assistant"
    assert assistant[1].startswith("more ")


def test_a_turn_that_was_refused_is_taken_back(run: Run, server: ThreadedServer) -> None:
    async def refuse_long(request: GenerateRequest, context: Context) -> None:
        if turns(request)[-1] == ("user", "long"):
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "too long", ErrorInfo(reason="PROMPT_TOO_LONG"))
        await answer("ok")(request, context)

    server.scripted.generations.behaviour = refuse_long
    result = run("chat", stdin="long\nshort\n")
    assert result.exit_code == 0
    assert "too long" in result.stderr
    assert turns(server.scripted.generations.requests[-1]) == [("user", "short")]


def test_what_was_shown_before_a_failure_ends_its_line(run: Run, server: ThreadedServer) -> None:
    async def fail(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")
        await abort(context, grpc.StatusCode.INTERNAL, "it broke", ErrorInfo(reason="GENERATION_FAILED"))

    server.scripted.generations.behaviour = fail
    result = run("chat", stdin="one\n")
    assert (result.exit_code, result.stdout) == (0, "half\n")
    assert "it broke" in result.stderr


def test_a_server_that_is_not_there_ends_the_chat(run: Run) -> None:
    result = run("chat", "--target", "127.0.0.1:1", stdin="one\n")
    assert (result.exit_code, result.stdout) == (69, "")
    assert "no server answers" in result.stderr
