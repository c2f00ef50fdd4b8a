"""Draws a canvas that is still being revised: the answer so far, what the block would become, and how far it is.

It lives on the console beside the answer and leaves no trace; the answer itself is written once it is final.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from mlxstream.v1.event_pb2 import BlockUpdate

FRAME_SECONDS: Final = 1 / 15
"""Shortest time between two frames: a person sees no more, and each asks the server for a text."""
SPARE_ROWS: Final = 1

_WORDS: Final = re.compile(r"\s+|\S+")
_ANSWER, _KEPT, _CHANGED, _STATUS = "default", "bright_black", "yellow", "dim"


class CanvasView:
    """Shows revisions on a terminal, and nowhere else, until `clear`. `most_passes` is told once it is known."""

    def __init__(
        self,
        console: Console,
        text_of: Callable[[Sequence[int]], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text_of` turns ids into a text that can drive no terminal, None if it cannot; `clock` counts seconds."""
        self.most_passes = 0
        self._console = console
        self._text_of = text_of
        self._clock = clock
        self._live: Live | None = None
        self._answer = ""
        self._before: str | None = None
        self._block_index = -1
        self._drawn_at = -FRAME_SECONDS

    @property
    def is_visible(self) -> bool:
        """Whether anything is drawn here, so that text must not be written to the screen in between."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def revise(self, update: BlockUpdate) -> None:
        """Draw a canvas, unless the last frame is too young or the canvas is about to become text."""
        if update.committed or self._clock() - self._drawn_at < FRAME_SECONDS:
            return
        if not self.is_visible:
            return
        if update.block_index != self._block_index:
            self._block_index, self._before = update.block_index, None
        self._drawn_at = self._clock()
        canvas = self._text_of(update.tokens)
        if canvas is None:
            return
        drawn = Text(self._answer, style=_ANSWER)
        drawn.append_text(difference(self._before, canvas))
        most = f" of at most {self.most_passes}" if self.most_passes else ""
        status = Text(f"block {update.block_index + 1} · pass {update.step}{most}", style=_STATUS)
        self._before = canvas
        self._show(_Tail(drawn, status))
        self._drawn_at = self._clock()

    def commit(self, text: str) -> None:
        """Add final text to the answer that canvases are drawn behind."""
        self._answer += text

    def clear(self) -> None:
        """Remove what is drawn."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, picture: _Tail) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(picture, refresh=True)


def difference(before: str | None, now: str) -> Text:
    """`now`, with the words that it does not share with `before` standing out; all of them where nothing was before."""
    text = Text()
    words = _WORDS.findall(now)
    matcher = SequenceMatcher(None, _WORDS.findall(before or ""), words, autojunk=False)
    for kind, _, _, start, end in matcher.get_opcodes():
        text.append("".join(words[start:end]), style=_KEPT if kind == "equal" else _CHANGED)
    return text


class _Tail:
    """The last lines of a text that fit above a line of status: what is being revised is always in sight."""

    def __init__(self, text: Text, status: Text) -> None:
        self._text = text
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._text, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - SPARE_ROWS - 1) :]:
            yield from line
            yield Segment.line()
        yield self._status
