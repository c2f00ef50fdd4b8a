"""`mlx-stream generate` against a scripted server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from rich.console import Console

from mlxstream import LocalReason, UnavailableError
from mlxstream.errors import ErrorDetails
from mlxstream.v1.event_pb2 import TokenChunk
from mlxstream.v1.generation_pb2 import GenerateRequest
from mlxstream.v1.options_pb2 import FILL_MODE_ECHO, GenerateOptions
from mlxstream.v1.result_pb2 import FINISH_REASON_LENGTH, GeneratedToken, TokenLogprobs, TopLogprob
from service.cli.asking import command_as_invoked, explained
from service.cli.probabilities import probability_table
from tests.cli.conftest import Run
from tests.clients.python.scripted_server import Context, Events, ThreadedServer, abort, answer, endless


def test_the_text_goes_to_standard_output_and_the_account_to_standard_error(run: Run) -> None:
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert "3 tokens at 5.0/s · prompt 3 tokens at 7/s" in result.stderr


def test_a_prompt_becomes_a_chat_where_the_model_has_a_template(run: Run, server: ThreadedServer) -> None:
    run("generate", "hi")
    run("generate", "--raw", "hi")
    run("generate", "--system", "Be brief.", "hi")
    by_default, raw, system = server.scripted.generations.requests
    assert [turn.role for turn in by_default.chat.messages] == ["user"]
    assert raw.text.text == "hi"
    assert [turn.role for turn in system.chat.messages] == ["system", "user"]
    assert run("generate", "--raw", "--system", "x", "hi").exit_code == 2


def test_images_stand_before_the_prompt_in_the_order_of_their_flags(
    run: Run, server: ThreadedServer, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("one.png", "two.jpg")]
    for file in files:
        file.write_bytes(file.name.encode())
    flags = [argument for file in files for argument in ("--image", str(file))]
    assert run("generate", "What is it?", *flags).exit_code == 0
    (request,) = server.scripted.generations.requests
    (turn,) = request.chat.messages
    assert [part.image or part.text for part in turn.content] == [b"one.png", b"two.jpg", "What is it?"]
    raw = run("generate", "--raw", "hi", *flags)
    assert (raw.exit_code, "--image needs the chat template" in raw.stderr) == (2, True)
    assert run("generate", "hi", "--image", str(tmp_path / "none.png")).exit_code == 2
    assert run("generate", "hi", "--image", str(tmp_path)).exit_code == 2


def test_flags_become_options_and_the_rest_stays_unset(run: Run, server: ThreadedServer) -> None:
    flags = ("--max-tokens", "5", "--temperature", "0", "--top-k", "3", "--seed", "7", "--stop", "a", "--stop", "b")
    assert run("generate", "hi", *flags, "--model", "tiny").exit_code == 0
    (request,) = server.scripted.generations.requests
    assert (request.options.max_tokens, request.options.top_k, request.options.seed) == (5, 3, 7)
    assert request.options.HasField("temperature")
    assert not request.options.HasField("top_p")
    assert list(request.options.stop_sequences) == ["a", "b"]
    assert request.model == "tiny"


def test_every_flag_of_an_option_reaches_the_field_of_its_name(run: Run, server: ThreadedServer) -> None:
    help_text = run("generate", "--help").stdout
    names = set(re.findall(r"--([a-z-]+)", help_text)) & {
        field.replace("_", "-") for field in GenerateOptions.DESCRIPTOR.fields_by_name
    }
    assert len(names) == 18
    for name in sorted(names - {"logit-bias", "logprobs"}):
        assert run("generate", "hi", f"--{name}", "1").exit_code == 0
        field, value = server.scripted.generations.requests[-1].options.ListFields()[-1]
        assert (field.name, value) == (name.replace("-", "_"), 1)


def test_a_zero_that_was_given_is_sent(run: Run, server: ThreadedServer) -> None:
    assert run("generate", "hi", "--seed", "0", "--top-k", "0", "--repetition-context-size", "0").exit_code == 0
    options = server.scripted.generations.requests[0].options
    assert [field.name for field, _ in options.ListFields()] == ["top_k", "seed", "repetition_context_size"]


def test_biases_and_options_without_a_flag_are_sent(run: Run, server: ThreadedServer) -> None:
    flags = ("--logit-bias", "5=-100", "--logit-bias", "7=1.5", "--option", "curve=[[0,0],[100,80]]")
    flags += ("--option", "fill=echo", "--option", 'hlg={"eotf": {"lw": 500}}')
    assert run("generate", "hi", *flags).exit_code == 0
    options = server.scripted.generations.requests[0].options
    assert [(one.token, one.bias) for one in options.logit_bias] == [(5, -100), (7, 1.5)]
    assert [(point.x_percent, point.y_percent) for point in options.curve] == [(0, 0), (100, 80)]
    assert (options.fill, options.hlg.eotf.lw) == (FILL_MODE_ECHO, 500)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--logit-bias", "5"), "'5' is not ID=VALUE"),
        (("--logit-bias", "a=1"), "'a=1' is not ID=VALUE"),
        (("--logit-bias", "-1=1"), "out of range"),
        (("--option", "curve"), "'curve' is not NAME=VALUE"),
        (("--option", "tempreature=1"), "did you mean 'temperature'?"),
        (("--option", "top_k=many"), "top_k"),
        (("--option", "seed=1", "--seed", "2"), "the option seed was given twice"),
        (("--seed", "18446744073709551616"), "seed"),
        (("--top-k", "-1"), "--top-k"),
    ],
)
def test_a_flag_that_no_message_can_carry_is_wrong_usage(run: Run, flags: tuple[str, ...], told: str) -> None:
    result = run("generate", "hi", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in " ".join(result.stderr.split())


async def with_logprobs(request: GenerateRequest, context: Context) -> None:
    """Two tokens, of which the second is half a character."""
    events = Events(context)
    await events.start()
    for index, (text_bytes, logprob) in enumerate([(b" hi\n", -0.1), (b"\xe2\x96", -3.0)]):
        top = [TopLogprob(token=65, logprob=-0.25), TopLogprob(token=100 + index, logprob=logprob)]
        logprobs = TokenLogprobs(logprob=logprob, top=top[: request.options.top_logprobs])
        token = GeneratedToken(token=100 + index, index=index, text_bytes=text_bytes, logprobs=logprobs)
        await events.send(chunk=TokenChunk(text=" hi\n" if index == 0 else "\ufffd", tokens=[token]))
    await events.finish()


def test_probabilities_are_shown_after_the_answer_and_leave_standard_output_alone(
    run: Run, server: ThreadedServer
) -> None:
    server.scripted.generations.behaviour = with_logprobs
    result = run("generate", "hi", "--logprobs")
    assert (result.exit_code, result.stdout) == (0, " hi\n\ufffd\n")
    rows = [line.split() for line in result.stderr.splitlines()[-2:]]
    assert rows == [['"', 'hi\\n"', "90.5%", "-0.100"], ["bytes", "e2", "96", "5.0%", "-3.000"]]
    request = server.scripted.generations.requests[0]
    assert request.delivery.include_token_bytes
    assert request.options.logprobs
    assert not request.options.HasField("top_logprobs")


def test_candidates_are_shown_with_their_text(run: Run, server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = with_logprobs
    result = run("generate", "hi", "--top-logprobs", "2")
    assert result.exit_code == 0
    assert '"A" 77.9%  " hi\\n" 90.5%' in result.stderr
    assert '"A" 77.9%  bytes e2 96 5.0%' in result.stderr
    assert server.scripted.generations.requests[0].options.logprobs


@pytest.mark.parametrize("option", ["logprobs=true", "top_logprobs=2"])
def test_probabilities_are_shown_however_they_were_asked_for(option: str, run: Run, server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = with_logprobs
    result = run("generate", "hi", "--option", option)
    assert '" hi\\n"' in result.stderr
    assert "90.5%" in result.stderr
    request = server.scripted.generations.requests[0]
    assert request.options.logprobs
    assert request.delivery.include_token_bytes


def test_a_candidate_that_is_part_of_a_character_is_told_by_its_id(run: Run, server: ThreadedServer) -> None:
    async def behave(request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        logprobs = TokenLogprobs(logprob=-0.1, top=[TopLogprob(token=0xFFFD, logprob=-0.25)])
        token = GeneratedToken(token=100, index=0, text_bytes=b"a", logprobs=logprobs)
        await events.send(chunk=TokenChunk(text="a", tokens=[token]))
        await events.finish()

    server.scripted.generations.behaviour = behave
    assert "bytes of id 65533 77.9%" in run("generate", "hi", "--top-logprobs", "1").stderr


def test_a_line_never_ends_inside_a_candidate() -> None:
    top = [TopLogprob(token=token, logprob=-0.1 * token) for token in range(20)]
    token = GeneratedToken(token=100, text_bytes=b" a token of several words", logprobs=TokenLogprobs(top=top))
    written = io.StringIO()
    table = probability_table([token], lambda candidate: f" to be {candidate}")
    Console(file=written, width=80).print(table)
    lines = written.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    found = [piece for line in lines for piece in re.findall(r'" to be \d+" [\d.]+%', line)]
    assert len(found) == 20
    assert '" a token of several words"' in lines[1]
    assert all(line.count('"') % 2 == 0 for line in lines)


def test_a_token_that_is_wider_than_a_line_keeps_its_blanks() -> None:
    written = io.StringIO()
    table = probability_table([GeneratedToken(token=100, text_bytes=b" " * 120)], str)
    Console(file=written, width=80).print(table)
    _, *lines = written.getvalue().splitlines()
    assert lines[0].startswith('"' + " " * 40)
    assert [line.count('"') for line in lines] == [1, *[0] * (len(lines) - 2), 1]
    assert len(lines) == 3


def test_help_names_the_models_default_where_it_comes_first(run: Run) -> None:
    told = " ".join(run("generate", "--help").stdout.split())
    assert "else 512" in told
    assert told.count("Default: the model's, else off.") == 3
    assert run("generate", "hi", "--min-tokens-to-keep", "0").exit_code == 2


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_prompt_can_be_piped_in(arguments: tuple[str, ...], run: Run, server: ThreadedServer) -> None:
    assert run("generate", "--raw", *arguments, stdin="from a pipe\n").exit_code == 0
    assert server.scripted.generations.requests[0].text.text == "from a pipe\n"


def test_a_pipe_that_is_not_utf8_is_wrong_usage(run: Run) -> None:
    result = run("generate", "-", stdin=b"\xff\xfe")
    assert result.exit_code == 2
    assert "not valid UTF-8" in result.stderr


def test_events_can_be_written_as_lines_of_json(run: Run) -> None:
    result = run("generate", "--json", "hi")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["sequence"] for event in events] == ["1", "2", "3", "4", "5"]
    assert events[1]["chunk"]["text"] == "Hello"
    assert events[-1]["finished"]["finish_reason"] == "FINISH_REASON_STOP"


def test_an_answer_that_was_cut_says_so(run: Run, server: ThreadedServer) -> None:
    async def cut(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("and then\n")
        await events.finish(FINISH_REASON_LENGTH)

    server.scripted.generations.behaviour = cut
    result = run("generate", "hi")
    assert result.stdout == "and then\n"
    assert "1 token (cut at the limit)" in result.stderr


def test_interrupting_cancels_and_says_how_much_was_generated(
    run: Run, server: ThreadedServer, interrupt_after: Callable[[int], None]
) -> None:
    server.scripted.generations.behaviour = endless
    interrupt_after(4)
    result = run("generate", "hi")
    assert result.exit_code == 130
    assert result.stdout.startswith("more more ")
    assert "cancelled after " in result.stderr
    server.wait_cancelled()


def test_interrupting_a_long_prompt_says_how_much_was_read(
    run: Run, server: ThreadedServer, interrupt_after: Callable[[int], None]
) -> None:
    async def read_slowly(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start(prompt_tokens=900)
        await events.progress(128, 900)
        await asyncio.Event().wait()

    server.scripted.generations.behaviour = read_slowly
    interrupt_after(2)
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "cancelled after reading 128 of 900 tokens of the prompt" in result.stderr


def test_nobody_at_the_target_is_one_clear_line_and_a_status_of_its_own(run: Run) -> None:
    result = run("generate", "hi", "--target", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (69, "")
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: no server answers at 127.0.0.1:1 (")
    assert line.endswith(" serve --model smollm2-135m --listen 127.0.0.1:1`")


def test_the_hint_to_start_a_server_names_the_socket_that_was_asked(run: Run, tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'no such.sock'}"
    result = run("generate", "hi", "--target", target)
    assert result.exit_code == 69
    assert result.stderr.endswith(f"serve --model smollm2-135m --listen '{target}'`\n")
    assert "TLS" not in result.stderr


@pytest.mark.parametrize(
    ("target", "cause", "may_start", "may_want_tls"),
    [
        ("127.0.0.1:5", "Connection refused", True, False),
        ("[::1]:5", "Connection refused", True, False),
        ("a.example:5", "Connection refused", True, True),
        ("127.0.0.1:5", "Socket closed", False, True),
        ("unix:/s", "Connection reset by peer", False, True),
    ],
)
def test_the_hint_follows_from_how_the_connection_failed(
    target: str, cause: str, may_start: bool, may_want_tls: bool
) -> None:
    details = ErrorDetails(reason=LocalReason.UNREACHABLE, metadata={"target": target, "cause": cause})
    told = explained(UnavailableError("nobody", code=grpc.StatusCode.UNAVAILABLE, details=details))
    assert (f" --listen {target}`" in told.replace("'", ""), "--tls" in told) == (may_start, may_want_tls)


@pytest.mark.parametrize("target", ["localhost", "http://localhost:50051", "localhost:99999", ""])
def test_a_target_that_is_none_is_wrong_usage(target: str, run: Run) -> None:
    result = run("generate", "hi", "--target", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"the target must be HOST:PORT or unix:PATH, not {target!r}" in result.stderr


def test_a_target_that_leads_nowhere_is_told_from_a_server_that_does_not_answer(run: Run) -> None:
    result = run("generate", "hi", "--target", "dns:///localhost:port")
    assert (result.exit_code, result.stdout) == (69, "")
    assert result.stderr == (
        "Error: the target dns:///localhost:port leads to no address; --target takes HOST:PORT or unix:PATH\n"
    )


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (".venv/bin/mlx-stream", ".venv/bin/mlx-stream"),
        ("/elsewhere/mlx-stream", "/elsewhere/mlx-stream"),
        ("/somewhere/service/cli/__main__.py", f"{sys.executable} -m service.cli"),
        ("/somewhere/pytest", "mlx-stream"),
    ],
)
def test_a_hint_names_the_command_as_it_was_typed(typed: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [typed])
    assert command_as_invoked() == hint


def test_a_hint_names_the_bare_command_where_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "mlx-stream"
    command.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(command)])
    assert command_as_invoked() == "mlx-stream"


def test_a_passed_deadline_says_how_far_it_had_come(run: Run, server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = endless
    result = run("generate", "hi", "--timeout", "0.4")
    assert result.exit_code == 1
    found = re.fullmatch(r"Error: stopped after 0\.4 s \(--timeout\), (\d+) tokens?\n", result.stderr)
    assert found is not None
    assert int(found.group(1)) == result.stdout.count("more ")


@pytest.mark.parametrize("flags", [("--timeout", "0"), ("--timeout", "nan"), ("--max-tokens", "0"), ("--top-k", "-1")])
def test_numbers_that_no_message_can_carry_are_wrong_usage(flags: tuple[str, str], run: Run) -> None:
    assert run("generate", "hi", *flags).exit_code == 2


def test_what_the_server_finds_wrong_is_wrong_usage_too(run: Run, server: ThreadedServer) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        info = ErrorInfo(reason="INVALID_REQUEST")
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "options.top_p: must be at most 1", info)

    server.scripted.generations.behaviour = refuse
    result = run("generate", "hi", "--top-p", "2")
    assert (result.exit_code, result.stderr) == (2, "Error: options.top_p: must be at most 1\n")


@pytest.mark.parametrize(("arguments", "stdin"), [((), ""), ((), "\n"), (("",), None), (("--system", "x", " "), None)])
def test_an_empty_prompt_is_no_chat(arguments: tuple[str, ...], stdin: str | None, run: Run) -> None:
    result = run("generate", *arguments, stdin=stdin)
    assert result.exit_code == 2
    assert "Error: the prompt is empty" in result.stderr


def test_a_refusal_is_the_servers_own_message(run: Run, server: ThreadedServer) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        await abort(context, grpc.StatusCode.UNAVAILABLE, "the engine is loading", ErrorInfo(reason="UNAVAILABLE"))

    server.scripted.generations.behaviour = refuse
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (69, "Error: the engine is loading\n")


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", 69),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_MEMORY", 2),
        (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_OPTION", 2),
        (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", 2),
        (grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION", 2),
        (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", 2),
        (grpc.StatusCode.INTERNAL, "INTERNAL", 1),
        (grpc.StatusCode.CANCELLED, "ABORTED", 1),
    ],
)
def test_the_status_tells_what_can_never_succeed_from_what_may_later(
    run: Run, server: ThreadedServer, code: grpc.StatusCode, reason: str, status: int
) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        await abort(context, code, "refused", ErrorInfo(reason=reason))

    server.scripted.generations.behaviour = refuse
    assert run("generate", "hi").exit_code == status


def test_a_server_that_is_full_is_a_status_to_try_again_on_and_tells_its_pause_once(
    run: Run, server: ThreadedServer
) -> None:
    message = "concurrent calls: 1 of 1 taken; retry after 1 s"

    async def refuse(_request: GenerateRequest, context: Context) -> None:
        info, pause = ErrorInfo(reason="OVERLOADED"), RetryInfo(retry_delay=Duration(seconds=1))
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message, info, pause)

    server.scripted.generations.behaviour = refuse
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (69, f"Error: {message}\n")


def test_an_answer_that_the_server_ended_says_how_far_it_had_come(run: Run, server: ThreadedServer) -> None:
    async def stop(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")
        await abort(
            context, grpc.StatusCode.UNAVAILABLE, "the service is shutting down", ErrorInfo(reason="UNAVAILABLE")
        )

    server.scripted.generations.behaviour = stop
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (69, "half\n")
    assert result.stderr == "ended by the server after 1 token\nError: the service is shutting down\n"


@pytest.mark.parametrize("count", ["-3", "0"])
def test_an_option_that_does_not_fit_is_wrong_usage(count: str, run: Run) -> None:
    result = run("generate", "--max-tokens", count, "hi")
    assert result.exit_code == 2
    assert f"Invalid value for '--max-tokens': {count} is not in the range x>=1." in result.stderr


def on_a_terminal(*arguments: str) -> str:
    """What a terminal is sent when the command runs on it."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "service.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env=environment):
        os.close(terminal)
        received = b""
        try:
            while piece := os.read(controller, 4096):
                received += piece
        except OSError:  # how Linux tells that the other side has gone
            pass
    os.close(controller)
    return received.decode()


def test_a_model_cannot_drive_the_terminal(run: Run, server: ThreadedServer) -> None:
    hostile = "\x1b[2Jtwo\rone\x07\u202ebidi\x9b"
    server.scripted.generations.behaviour = answer(hostile, "é\t🏳️‍🌈")
    shown = on_a_terminal("generate", "hi", "--target", server.scripted.target)
    assert shown == "\\x1b[2Jtwo\\rone\\x07\\u202ebidi\\x9bé\t🏳️‍🌈\r\n"
    assert run("generate", "hi").stdout_bytes.decode() == hostile + "é\t🏳️‍🌈\n"
