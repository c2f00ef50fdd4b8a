"""`generate --show-canvas`: what a person sees of a block that settles, and what stays on the screen."""

from __future__ import annotations

import io
from collections.abc import Sequence

import grpc
import pytest
from rich.console import Console

import mlxstream
from mlxstream.v1.event_pb2 import BlockUpdate, Finished
from mlxstream.v1.generation_pb2 import GenerateRequest
from mlxstream.v1.result_pb2 import DenoisingStats, FinishReason, GenerateStats
from service.cli.asking import canvas_view
from service.cli.canvas import FRAME_SECONDS, CanvasView, difference
from service.cli.terminal import Terminal
from tests.cli.conftest import Run
from tests.clients.python.scripted_server import Context, Events, ThreadedServer


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def update(block: int, step: int, text: str, *, committed: bool = False) -> BlockUpdate:
    tokens = [ord(character) for character in text]
    return BlockUpdate(block_index=block, revision=step, step=step, tokens=tokens, committed=committed)


class Screen:
    """A view on a terminal of its own, whose clock a test moves by one frame for each update."""

    def __init__(self, *, height: int = 10, width: int = 40, terminal: bool = True) -> None:
        self.shown = io.StringIO()
        self.seconds = 0.0
        self.step = FRAME_SECONDS
        console = Console(file=self.shown, force_terminal=terminal, width=width, height=height, color_system=None)
        self.view = CanvasView(console, letters, clock=lambda: self.seconds)

    def revise(self, *updates: BlockUpdate) -> str:
        """What was drawn since the call before."""
        before = len(self.shown.getvalue())
        for one in updates:
            self.seconds += self.step
            self.view.revise(one)
        return self.shown.getvalue()[before:]


def test_every_revision_is_drawn_with_the_answer_before_it_and_how_far_it_is() -> None:
    screen = Screen()
    assert "xyz" in screen.revise(update(0, 1, "xyz"))
    screen.view.commit("Once ")
    drawn = screen.revise(update(1, 7, "upon"))
    assert "Once upon" in drawn
    assert "block 2 · pass 7" in drawn


def test_the_most_passes_are_told_where_the_server_has_said_them() -> None:
    screen = Screen()
    screen.view.most_passes = 48
    assert "block 1 · pass 3 of at most 48" in screen.revise(update(0, 3, "x"))


def test_frames_come_no_faster_than_an_eye_can_follow() -> None:
    screen = Screen()
    screen.step = FRAME_SECONDS / 10
    drawn = screen.revise(*(update(0, step, f"draft {step}") for step in range(1, 21)))
    assert 1 <= sum(f"draft {step}\n" in drawn or f"draft {step} " in drawn for step in range(1, 21)) <= 3


def test_the_last_revision_of_a_block_is_left_to_the_text_that_follows() -> None:
    screen = Screen()
    assert screen.revise(update(0, 3, "done", committed=True)) == ""


def test_a_long_answer_shows_its_end_where_the_canvas_is() -> None:
    screen = Screen(height=6, width=20)
    screen.view.commit("".join(f"line {number}\n" for number in range(50)))
    drawn = screen.revise(update(5, 1, "canvas"))
    assert "canvas" in drawn
    assert "line 49" in drawn
    assert "line 40" not in drawn


def test_nothing_is_drawn_where_nobody_looks_on() -> None:
    screen = Screen(terminal=False)
    assert not screen.view.is_visible
    assert screen.revise(update(0, 1, "xyz")) == ""


def test_what_has_changed_stands_out_from_what_has_settled() -> None:
    text = difference("the cat sat", "the dog sat")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert text.plain == "the dog sat"
    assert styles["the "] == styles[" sat"] != styles["dog"]
    assert {str(span.style) for span in difference(None, "new").spans} == {styles["dog"]}


async def denoise_slowly(_request: GenerateRequest, context: Context) -> None:
    """A heartbeat between two revisions, as of a model that takes long over each."""
    events = Events(context)
    await events.start()
    await events.progress(3, 3)
    await events.send(block=update(0, 1, "Hxllo"))
    await events.progress(3, 3)
    await events.text("Hello")
    await events.finish()


def test_a_heartbeat_leaves_a_canvas_alone_and_before_it_says_what_is_waited_for(server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = denoise_slowly
    output, shown = io.StringIO(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=24)
    with mlxstream.Client(server.scripted.target) as client:
        Terminal(output, console, canvas=CanvasView(console, letters)).show(client.stream("x"))
    assert output.getvalue() == "Hello\n"
    assert shown.getvalue().count("waiting for the answer") == 1
    assert shown.getvalue().index("waiting for the answer") < shown.getvalue().index("Hxllo")


async def denoise(_request: GenerateRequest, context: Context) -> None:
    """Two blocks, each with a revision before it is committed."""
    events = Events(context)
    await events.start()
    for block, (draft, final) in enumerate((("Hxllo", "Hello"), (", wxrld", ", world"))):
        await events.send(block=update(block, 1, draft))
        await events.send(block=update(block, 2, final, committed=True))
        await events.text(final)
    account = DenoisingStats(steps=4, blocks=2, canvas_tokens=128)
    stats = GenerateStats(prompt_tokens=3, generated_tokens=2, decode_tps=5.0, denoising=account)
    await events.send(finished=Finished(finish_reason=FinishReason.FINISH_REASON_STOP, stats=stats))


def test_the_answer_is_written_once_when_the_canvas_has_gone(server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = denoise
    output, shown = io.StringIO(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=24)
    view = CanvasView(console, lambda ids: letters(ids))
    with mlxstream.Client(server.scripted.target) as client:
        answer = Terminal(output, console, canvas=view).show(client.stream("x"))
    assert (answer.text, output.getvalue()) == ("Hello, world", "Hello, world\n")
    assert "xllo" in shown.getvalue()
    assert "2 tokens at 5.0/s · 2 blocks in 4 passes · prompt 3 tokens" in shown.getvalue()


def test_a_canvas_whose_words_cannot_be_had_is_left_out_and_the_answer_goes_on(server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = denoise
    output, shown = io.StringIO(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=24)
    asked: list[Sequence[int]] = []
    with mlxstream.Client(server.scripted.target) as client, pytest.MonkeyPatch.context() as patch:

        def refuse(ids: Sequence[int], *, model: str) -> str:
            asked.append(ids)
            raise mlxstream.OverloadedError(f"{model} is busy", code=grpc.StatusCode.RESOURCE_EXHAUSTED)

        patch.setattr(client, "detokenize", refuse)
        answer = Terminal(output, console, canvas=canvas_view(console, client, model="m")).show(client.stream("x"))
    assert asked
    assert (answer.text, output.getvalue()) == ("Hello, world", "Hello, world\n")
    assert "xllo" not in shown.getvalue()


def test_without_a_terminal_the_text_comes_block_by_block_and_nothing_is_drawn(
    run: Run, server: ThreadedServer
) -> None:
    server.scripted.generations.behaviour = denoise
    result = run("generate", "hi", "--show-canvas")
    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert "pass 1" not in result.stderr
    assert "2 blocks in 4 passes" in result.stderr


@pytest.mark.parametrize("asked", [True, False])
def test_canvases_are_asked_for_only_when_they_are_to_be_shown(run: Run, server: ThreadedServer, asked: bool) -> None:
    run("generate", "hi", *(["--show-canvas"] if asked else []))
    assert server.scripted.generations.requests[-1].delivery.draft_blocks is asked
