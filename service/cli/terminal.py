"""Shows a generation in the terminal: the text on standard output, everything else on standard error.

On a terminal, text is made harmless first: a model can write what it likes, but it cannot drive the screen.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from google.protobuf.json_format import MessageToDict
from rich.console import Console, RenderableType

from mlxstream import FinishReason, MlxStreamError, TextStream
from mlxstream.v1.event_pb2 import Heartbeat
from mlxstream.v1.result_pb2 import GeneratedToken
from service.cli.canvas import CanvasView
from service.cli.progress import ProgressLine

# How often the server reports on a prompt that is still being read.
PROGRESS_DELIVERY = {"heartbeat_interval": 0.25}
# More than any row of a table holds.
UNBOUNDED_COLUMNS = 10_000
_SHOWN_AS_THEY_ARE = {"\n", "\t"}
# Joiners and marks shape characters; the other invisible ones can reorder or hide what is on the screen.
_HARMLESS_FORMAT = {"\u200c", "\u200d", "\u00ad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was shown, and the tokens that it is made of. `interrupted` is True when Ctrl-C ended it."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    interrupted: bool


class Terminal:
    """Where an answer goes: `output` takes its text, `console` the progress and the notes.

    `spaced` sets the answer off by blank lines, for a person who reads one after the other. With a `canvas`, blocks
    are drawn there while they are revised, and the answer is written as a whole.
    """

    def __init__(
        self, output: TextIO, console: Console, *, spaced: bool = False, canvas: CanvasView | None = None
    ) -> None:
        self._output = output
        self._console = console
        self._spaced = spaced
        self._canvas = canvas
        self._progress = ProgressLine(console)
        self._pieces: list[str] = []
        self._is_within_line = False
        self._tokens: list[GeneratedToken] = []
        self._prefill = Heartbeat()

    def show(self, stream: TextStream) -> Answer:
        """Show text as it comes, and the account at the end. Ctrl-C cancels, and tells how far it had come.

        Raises:
            MlxStreamError: The generation failed; what came before it has been shown.
        """
        self._pieces, self._tokens, self._prefill = [], [], Heartbeat()
        self._is_within_line = False
        began, interrupted, ended = time.monotonic(), False, ""
        self._space()
        try:
            with stream:
                self._follow(stream)
        except KeyboardInterrupt:
            interrupted = True
        except MlxStreamError as error:
            ended = _end_by_the_server(stream, error)
            raise
        finally:
            self._put_what_was_drawn()
            self._end_line()
            if ended:
                self.note(ended)
        self.note(self._cancellation(stream, time.monotonic() - began) if interrupted else account(stream))
        self._space()
        return Answer(text="".join(self._pieces), tokens=tuple(self._tokens), interrupted=interrupted)

    def note(self, text: str, *, to_copy: bool = False) -> None:
        """Say something beside the answer; what is `to_copy` is not broken into lines."""
        soft_wrap = to_copy or not self._console.is_terminal
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=soft_wrap)

    def interject(self, text: str) -> None:
        """Say something while an answer is being written: on a line of its own, where both share a screen."""
        self._progress.clear()
        if self._is_within_line and self._output.isatty() and self._console.is_terminal:
            self._put("\n")
        self.note(text)

    def _follow(self, stream: TextStream) -> None:
        draws = False
        with self._progress as line:
            for response in stream.events():
                event = response.WhichOneof("event")
                if event == "heartbeat" and not self._pieces and not draws:
                    self._prefill = response.heartbeat
                    done, total = self._prefill.prefilled_tokens, self._prefill.prompt_tokens
                    label = "reading the prompt" if done < total else "waiting for the answer"
                    line.show(label, done / max(total, 1), f"{done}/{total} tokens")
                elif event == "started" and self._canvas is not None:
                    self._canvas.most_passes = response.started.options.denoising.max_denoising_steps
                elif event == "chunk":
                    line.clear()
                    self._tokens += response.chunk.tokens
                    self._write(response.chunk.text)
                elif event == "block" and self._canvas is not None:
                    line.clear()
                    self._canvas.revise(response.block)
                    draws = self._canvas.is_visible

    def _write(self, text: str) -> None:
        self._pieces.append(text)
        if self._canvas is not None and self._canvas.is_visible:
            self._canvas.commit(harmless(text))
        else:
            self._put(text)

    def _put(self, text: str) -> None:
        self._output.write(harmless(text) if self._output.isatty() else text)
        self._output.flush()
        if text:
            self._is_within_line = not text.endswith("\n")

    def _put_what_was_drawn(self) -> None:
        if self._canvas is not None and self._canvas.is_visible:
            self._canvas.clear()
            self._put("".join(self._pieces))

    def _end_line(self) -> None:
        if self._is_within_line:
            self._put("\n")
        if self._pieces:
            self._space()

    def _space(self) -> None:
        if self._spaced:
            self._output.write("\n")
            self._output.flush()

    def _cancellation(self, stream: TextStream, elapsed_seconds: float) -> str:
        if stream.usage.generated_tokens:
            return f"cancelled after {tokens(stream.usage.generated_tokens)}, {elapsed_seconds:.1f} s"
        if self._prefill.prompt_tokens:
            done, total = self._prefill.prefilled_tokens, self._prefill.prompt_tokens
            return f"cancelled after reading {done} of {tokens(total)} of the prompt"
        return "cancelled before the first token"


def _end_by_the_server(stream: TextStream, error: MlxStreamError) -> str:
    """How far an answer had come that the server ended; empty where nothing had, or where the error itself tells."""
    generated_tokens = stream.usage.generated_tokens
    if not generated_tokens or "generated_tokens" in error.metadata:
        return ""
    return f"ended by the server after {tokens(generated_tokens)}"


def show_as_json(stream: TextStream, output: TextIO) -> None:
    """Write every event as one line of JSON, with the schema's field names."""
    with stream:
        for response in stream.events():
            line = json.dumps(MessageToDict(response, preserving_proto_field_name=True), ensure_ascii=False)
            output.write(line + "\n")
            output.flush()


def print_whole(picture: RenderableType, console: Console) -> None:
    """Fit `picture` to a terminal; for a file or a program, each row is one line, without blanks at its end."""
    if console.is_terminal:
        console.print(picture)
        return
    options = console.options.update(width=UNBOUNDED_COLUMNS)
    for line in console.render_lines(picture, options, pad=False):
        console.file.write("".join(segment.text for segment in line).rstrip() + "\n")


def harmless(text: str) -> str:
    """The text with every character that could drive a terminal, or hide there, written as an escape."""
    return "".join(map(_harmless_character, text))


def _harmless_character(character: str) -> str:
    category = unicodedata.category(character)
    if category not in {"Cc", "Cf", "Cs", "Zl", "Zp"} or character in _SHOWN_AS_THEY_ARE | _HARMLESS_FORMAT:
        return character
    return character.encode("unicode_escape").decode("ascii")


def tokens(count: int) -> str:
    """A count with its noun."""
    return f"{count} token" if count == 1 else f"{count} tokens"


def account(stream: TextStream) -> str:
    """One line about a finished generation."""
    stats = stream.stats
    if stats is None:
        return "ended without an account"
    limit = " (cut at the limit)" if stream.finish_reason is FinishReason.LENGTH else ""
    made = f"{tokens(stats.generated_tokens)}{limit} at {stats.decode_tps:.1f}/s"
    first = f"first token after {stats.time_to_first_token_ms / 1000:.2f} s"
    if stats.HasField("denoising"):
        blocks, steps = stats.denoising.blocks, stats.denoising.steps
        return " · ".join((made, f"{blocks} blocks in {steps} passes", f"prompt {tokens(stats.prompt_tokens)}", first))
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    prompt = f"prompt {tokens(stats.prompt_tokens)}{cached}"
    if not stats.prefill_tps:  # it was resumed: neither the prompt nor the first token came in this attempt
        return f"{made} · {prompt}"
    return " · ".join((made, f"{prompt} at {stats.prefill_tps:.0f}/s", first))


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show that something is going on, where a person looks on."""
    with console.status(what) if console.is_terminal else nullcontext():
        yield
