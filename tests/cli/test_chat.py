"""`mlx-stream chat` against a scripted server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from mlxstream.v1.generation_pb2 import GenerateRequest
from tests.cli.conftest import Run
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
    assert "unknown command /what: /reset" in result.stderr
    assert "/retry asks again" in result.stderr
    assert server.scripted.generations.requests == []


def test_a_cancelled_answer_keeps_what_was_written_and_the_chat_goes_on(
    run: Run, server: ThreadedServer, interrupt_after: Callable[[int], None]
) -> None:
    async def endless_at_first(request: GenerateRequest, context: Context) -> None:
        await (endless if len(server.scripted.generations.requests) == 1 else answer("fine"))(request, context)

    server.scripted.generations.behaviour = endless_at_first
    interrupt_after(3)
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


def test_a_server_that_went_away_leaves_the_conversation_to_be_gone_on_with(run: Run, server: ThreadedServer) -> None:
    async def go_away_once(request: GenerateRequest, context: Context) -> None:
        if len(server.scripted.generations.requests) == 2:
            events = Events(context)
            await events.start()
            await events.text("half ")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        await answer("whole")(request, context)

    server.scripted.generations.behaviour = go_away_once
    result = run("chat", stdin="one\ntwo\n/retry\n/retry\n")
    assert (result.exit_code, result.stdout) == (0, "whole\nhalf \nwhole\n")
    assert "went away after 1 token. The conversation is kept; /retry asks again" in result.stderr
    assert "every question has its answer" in result.stderr
    assert turns(server.scripted.generations.requests[-1]) == [("user", "one"), ("assistant", "whole"), ("user", "two")]


def test_a_server_that_is_gone_does_not_end_a_chat_that_has_begun(
    run: Run, server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_before_the_second(_prompt: str, lines: Iterator[str] = iter(["one", "two", "three"])) -> str:  # noqa: B008
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "two":
            server.close()
        return line

    monkeypatch.setattr("builtins.input", leave_before_the_second)
    result = run("chat")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert result.stderr.count("The conversation is kept; /retry asks again") == 2


def test_pressing_ctrl_c_at_the_prompt_tells_once_how_to_leave(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    presses = iter([KeyboardInterrupt, KeyboardInterrupt, KeyboardInterrupt, EOFError])

    def press(_prompt: str) -> str:
        raise next(presses)

    monkeypatch.setattr("builtins.input", press)
    result = run("chat")
    assert result.exit_code == 0
    assert result.stderr.count("Ctrl-D or /exit leaves") == 1
    assert result.stderr.count("/reset forgets") == 1
