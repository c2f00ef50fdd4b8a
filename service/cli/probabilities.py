"""Shows how probable each token of an answer was, and what could have stood in its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from mlxstream.v1.result_pb2 import GeneratedToken
from service.cli.terminal import harmless

_SURE: Final = 0.5
_UNSURE: Final = 0.1


def probability_table(tokens: Sequence[GeneratedToken], text_of: Callable[[int], str]) -> Table:
    """A row for each token with its log-probability, and the most likely candidates where they were asked for.

    Args:
        tokens: with their bytes and log-probabilities.
        text_of: the text of a candidate by its id; asked once for each id that was never chosen.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("token", overflow="fold")
    table.add_column("probability", justify="right")
    table.add_column("log", justify="right")
    table.add_column("most likely", overflow="fold")
    shown = {token.token: shown_token(token.text_bytes) for token in tokens}
    for token in tokens:
        candidates = []
        for one in token.logprobs.top:
            if one.token not in shown:
                shown[one.token] = quoted(text_of(one.token))
            candidates.append(Text.assemble(shown[one.token], " ", _probability(one.logprob)))
        logprob = token.logprobs.logprob
        table.add_row(Text(shown[token.token]), _probability(logprob), f"{logprob:.3f}", Text("  ").join(candidates))
    return table


def shown_token(text_bytes: bytes) -> str:
    """A token in quotes, or the bytes of one that is part of a character."""
    try:
        return quoted(text_bytes.decode())
    except UnicodeDecodeError:
        return f"bytes {text_bytes.hex(' ')}"


def quoted(text: str) -> str:
    """A text on one line, with its blanks visible between quotes, and nothing in it that could drive a terminal."""
    return harmless(json.dumps(text, ensure_ascii=False))


def _probability(logprob: float) -> Text:
    probability = math.exp(logprob)
    style = "green" if probability >= _SURE else "yellow" if probability >= _UNSURE else "red"
    return Text(f"{probability:.1%}", style=style)
