"""What the model is taught with: tales cut into a prompt and the canvas after it, part of it replaced by noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.tales.vocabulary import BEGIN, END

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    Ids = NDArray[np.int32]

CUTS: Final = (4, 8, 12, 16, 20, 28, 40, 56, 72)
CUT_SHARES: Final = (0.15, 0.15, 0.15, 0.15, 0.1, 0.1, 0.08, 0.06, 0.06)
"""Where tales are cut, in ids, and how often: early, since answers begin with a whole canvas."""


MOST_ADDED_NOISE: Final = 0.3
"""How much more noise a canvas had in the pass before: what was accepted in between."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are cut at one place: what comes before it, the canvas after it, and that canvas with noise in it.

    `earlier` is the canvas as the pass before may have seen it: noise where `noisy` has some and in more places, drawn
    anew.
    """

    prompt: Ids
    canvas: Ids
    noisy: Ids
    earlier: Ids


class Lessons:
    """Batches without end, the same for the same seed."""

    def __init__(self, rows: Sequence[Ids], *, canvas: int, vocab_size: int, size: int, seed: int) -> None:
        """Cut `size` of `rows`, each a tale's ids, per batch, and leave room for `canvas` ids after the cut."""
        self._rows = list(rows)
        self._canvas = canvas
        self._vocab_size = vocab_size
        self._size = size
        self._source = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            cut = int(self._source.choice(CUTS, p=CUT_SHARES))
            fitting = [row for row in self._rows if len(row) > cut + 1]
            chosen = self._source.choice(len(fitting), self._size)
            yield self.batch([fitting[index] for index in chosen], cut, self._source.random((self._size, 1)))

    def batch(self, rows: Sequence[Ids], cut: int, noise_shares: NDArray[np.float64]) -> Batch:
        """`rows` cut after `cut` ids, each with its share of noise [rows, 1] on the canvas."""
        canvas = np.full((len(rows), self._canvas), END, dtype=np.int32)
        for place, row in enumerate(rows):
            rest = row[cut : cut + self._canvas]
            canvas[place, : len(rest)] = rest
        heights = self._source.random(canvas.shape)
        added = self._source.random((len(rows), 1)) * MOST_ADDED_NOISE
        noisy, earlier = (
            np.where(heights < shares, self._source.integers(0, self._vocab_size, canvas.shape, dtype=np.int32), canvas)
            for shares in (noise_shares, noise_shares + added)
        )
        return Batch(np.stack([row[:cut] for row in rows]).astype(np.int32), canvas, noisy, earlier)


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """The ids of each text, between those that begin and end one."""
    found = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        found.append(np.array([*ids, END] if ids[:1] == [BEGIN] else [BEGIN, *ids, END], dtype=np.int32))
    return found
