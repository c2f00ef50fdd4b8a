"""Shows how probable each token of an answer was, and what could have stood in its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final

from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlxstream.v1.result_pb2 import GeneratedToken
from service.cli.terminal import harmless

_GAP: Final = "  "
_SURE: Final = 0.5
_UNSURE: Final = 0.1


def probability_table(tokens: Sequence[GeneratedToken], text_of: Callable[[int], str]) -> Table:
    """A row for each token with its log-probability, and the most likely candidates where they were asked for.

    Args:
        tokens: with their bytes and log-probabilities.
        text_of: the text of a candidate by its id; asked once for each id that was never chosen.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("token")
    table.add_column("probability", justify="right")
    table.add_column("log", justify="right")
    table.add_column("most likely")
    shown = {token.token: shown_token(token.text_bytes) for token in tokens}
    for token in tokens:
        candidates = []
        for one in token.logprobs.top:
            if one.token not in shown:
                shown[one.token] = _shown_candidate(one.token, text_of(one.token))
            candidates.append(Text.assemble(shown[one.token], " ", _probability(one.logprob)))
        logprob = token.logprobs.logprob
        table.add_row(_Pieces([Text(shown[token.token])]), _probability(logprob), f"{logprob:.3f}", _Pieces(candidates))
    return table


class _Pieces:
    """Texts beside each other, on as many lines as that takes: a line ends between two of them.

    One that is wider than a line is folded wherever the line ends, since its blanks matter.
    """

    def __init__(self, pieces: Sequence[Text]) -> None:
        self._pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        line = Text()
        for piece in self._pieces:
            *full, rest = _folded(piece, options.max_width)
            if line and (full or line.cell_len + len(_GAP) + rest.cell_len > options.max_width):
                yield line
                line = Text()
            yield from full
            line.append(_GAP if line else "").append_text(rest)
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [piece.cell_len for piece in self._pieces] or [0]
        return Measurement(max(widths), sum(widths) + len(_GAP) * (len(widths) - 1)).with_maximum(options.max_width)


def _folded(text: Text, width: int) -> Sequence[Text]:
    """The text in lines of `width` cells, full but for the last."""
    parts = chop_cells(text.plain, max(width, 1))
    return list(text.divide(list(accumulate(map(len, parts)))[:-1]))


def shown_token(text_bytes: bytes) -> str:
    """A token in quotes, or the bytes of one that is part of a character."""
    try:
        return quoted(text_bytes.decode())
    except UnicodeDecodeError:
        return f"bytes {text_bytes.hex(' ')}"


def _shown_candidate(token: int, text: str) -> str:
    """A candidate, of which only the text is known: that of a part of a character tells nothing, so its id does."""
    return f"bytes of id {token}" if "\ufffd" in text else quoted(text)


def quoted(text: str) -> str:
    """A text on one line, with its blanks visible between quotes, and nothing in it that could drive a terminal."""
    return harmless(json.dumps(text, ensure_ascii=False))


def _probability(logprob: float) -> Text:
    probability = math.exp(logprob)
    style = "green" if probability >= _SURE else "yellow" if probability >= _UNSURE else "red"
    return Text(f"{probability:.1%}", style=style)
