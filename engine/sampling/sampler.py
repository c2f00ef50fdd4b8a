"""Chooses one token for each row of a step: processors, then greedy rows together, then drawn rows together.

No row sees another's options, history or key. Nothing waits for the device until `SampledTokens.read`, and that reads
one array for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from engine.contracts.results import SampledToken
from engine.sampling import logprobs
from engine.sampling.choice import Choice
from engine.sampling.columns import largest
from engine.sampling.drawing import draw, draw_by_mass, draw_exactly, draw_replaced, draw_with_exclusion
from engine.sampling.greedy import choose_greedily
from engine.sampling.mass import log_softmax, odds_of, total
from engine.sampling.processors import process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.sampling.recipe import Draw, Recipe

_SOUND, _SURE = 1, 2


def sample(
    logits: mx.array, draws: Sequence[Draw], *, unread: mx.array | None = None, composed: bool = False
) -> SampledTokens:
    """Choose a token for each row.

    Args:
        logits: [R, V], one row for each draw.
        draws: what is to be chosen for each row, in the same order.
        unread: ids [U] of tokens that only the device knows, which draws refer to.
        composed: avoid the library's exponential.

    Source: reference, autoregressive §3.1 to §3.4.
    """
    raw = logits.astype(mx.float32)
    # The largest tells all: it is NaN where one logit is, inf where one is, and -inf where all are.
    tops = largest(raw)
    sound = mx.isfinite(tops)
    processed = process(raw, draws, unread)  # what a constraint masks is masked here, before anything is measured
    if processed is not raw:
        tops = largest(processed)
    rows = _Rows(processed, tops, draws, composed=composed)
    choice = rows.choose()
    return SampledTokens(rows, choice, sound)


class SampledTokens:
    """One token for each row: on the device at once, on the host after `read`."""

    __slots__ = ("_report", "_rows", "corrected", "tokens")

    def __init__(self, rows: _Rows, choice: Choice, sound: mx.array) -> None:
        """`choice` was made of `rows`; `sound` [R] tells whose logits are finite."""
        self.tokens = choice.tokens
        """Ids [R] uint32, unevaluated."""
        self.corrected: frozenset[int] = frozenset()
        """After `read`: the places at which it found another token than `tokens` holds."""
        self._rows = rows
        flags = sound.astype(mx.uint32) * _SOUND + choice.sure.astype(mx.uint32) * _SURE
        self._report = mx.concatenate([self.tokens, flags, *rows.measured(self.tokens)])

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before `read` is quick."""
        return [self.tokens, self._report]

    def read(self) -> list[SampledToken | None]:
        """The tokens; None for a row whose logits are not finite numbers, whatever stands in `tokens`.

        A token that was not certain is decided here, and may differ from that in `tokens`.
        """
        report = np.array(self._report)
        size = len(self._rows.draws)
        guesses, flags, words = report[:size].tolist(), report[size : 2 * size].tolist(), report[2 * size :]
        measured = self._rows.measurements(words)
        read: list[SampledToken | None] = []
        corrected = []
        for row, (guess, flag) in enumerate(zip(guesses, flags, strict=True)):
            if not flag & _SOUND:
                read.append(None)
                continue
            token = guess if flag & _SURE else self._rows.choose_exactly(row)
            line = measured.get(row)
            if token != guess:
                corrected.append(row)
                line = None if line is None else self._rows.remeasured(row, token)
            told = None if line is None else logprobs.read(line, token, self._rows.draws[row].recipe.options)
            read.append(SampledToken(token, told))
        self.corrected = frozenset(corrected)
        return read


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rows whose scores matter, not only their order: their numbers, scores [S, V] below 0, and sums of odds [S].

    `odds` [N, V] are those of `summed`, the rows whose sum is wanted; the others have no sum.
    """

    rows: list[int]
    scores: mx.array
    totals: mx.array
    summed: list[int]
    odds: mx.array

    def of(self, rows: list[int]) -> tuple[mx.array, mx.array]:
        """Scores and sums of some of these rows."""
        if rows == self.rows:
            return self.scores, self.totals
        places = mx.array([self.rows.index(row) for row in rows])
        return self.scores[places], self.totals[places]

    def odds_of(self, rows: list[int]) -> mx.array:
        """Odds of some of the rows that have a sum."""
        return self.odds if rows == self.summed else self.odds[mx.array([self.summed.index(row) for row in rows])]


class _Rows:
    """All rows of one step after their processors."""

    def __init__(self, logits: mx.array, tops: mx.array, draws: Sequence[Draw], *, composed: bool) -> None:
        self.draws = draws
        self._logits = logits
        self._tops = tops
        self._composed = composed
        self._scored = self._score()
        self._told = [row for row, one in enumerate(draws) if one.recipe.tells]
        self._width = max((draws[row].recipe.options.top_logprobs for row in self._told), default=0)

    def choose(self) -> Choice:
        """A token for each row, every kind of row together."""
        ways: dict[Callable[[list[int]], Choice], list[int]] = {}
        for row, one in enumerate(self.draws):
            ways.setdefault(self._way(one.recipe), []).append(row)
        found = [way(rows) for way, rows in ways.items()]
        if len(found) == 1:
            return found[0]
        back = mx.array(np.argsort([row for rows in ways.values() for row in rows]))
        tokens = mx.concatenate([one.tokens for one in found])
        sure = mx.concatenate([one.sure for one in found])
        return Choice(tokens[back], sure[back])

    def choose_exactly(self, row: int) -> int:
        """The token of one row by the rules themselves; waits for the device."""
        if self.draws[row].recipe.is_greedy:
            return cast("int", mx.argmax(log_softmax(self._logits[row], composed=self._composed)).item())
        scores, _ = self._scored.of([row])
        return draw_exactly(scores[0], self.draws[row])

    def measured(self, tokens: mx.array) -> list[mx.array]:
        """The log-probabilities that are asked for, as one row of words; nothing where none are."""
        if not self._told:
            return []
        scores, totals = self._scored.of(self._told)
        return [logprobs.measure(scores, tokens[mx.array(self._told)], totals, self._width).reshape(-1)]

    def measurements(self, words: logprobs.Words) -> dict[int, logprobs.Words]:
        """Those words by row."""
        if not self._told:
            return {}
        return dict(zip(self._told, words.reshape(len(self._told), -1), strict=True))

    def remeasured(self, row: int, token: int) -> logprobs.Words:
        """The words of one row for another token than was measured; waits for the device."""
        scores, totals = self._scored.of([row])
        return np.array(logprobs.measure(scores, mx.array([token]), totals, self._width)[0])

    def _way(self, recipe: Recipe) -> Callable[[list[int]], Choice]:
        if recipe.is_replaced:
            return self._replaced
        if recipe.is_greedy:
            return self._greedy
        if recipe.excludes:
            return self._excluding
        return self._drawn_by_mass if recipe.goes_deep else self._drawn

    def _greedy(self, rows: list[int]) -> Choice:
        return choose_greedily(self._of(self._logits, rows))

    def _drawn(self, rows: list[int]) -> Choice:
        scores, totals = self._scored.of(rows)
        return draw(scores, [self.draws[row] for row in rows], totals)

    def _drawn_by_mass(self, rows: list[int]) -> Choice:
        scores, totals = self._scored.of(rows)
        return draw_by_mass(scores, [self.draws[row] for row in rows], totals, self._scored.odds_of(rows))

    def _excluding(self, rows: list[int]) -> Choice:
        scores, totals = self._scored.of(rows)
        return draw_with_exclusion(scores, [self.draws[row] for row in rows], totals)

    def _replaced(self, rows: list[int]) -> Choice:
        scores, totals = self._scored.of(rows)
        return draw_replaced(scores - mx.log(totals)[:, None], [self.draws[row] for row in rows])

    def _score(self) -> _Scored:
        rows = [row for row, one in enumerate(self.draws) if not one.recipe.is_greedy or one.recipe.needs_total]
        if not rows:
            return _Scored(rows, self._logits[:0], self._tops[:0], [], self._logits[:0])
        scores = self._of(self._logits, rows) - self._of(self._tops, rows)[:, None]
        summed = [row for row in rows if self.draws[row].recipe.needs_total]
        places = mx.array([place for place, row in enumerate(rows) if row in set(summed)], dtype=mx.int32)
        odds = odds_of(scores if summed == rows else scores[places], composed=self._composed)
        totals = mx.ones(len(rows))
        totals[places] = total(odds)
        return _Scored(rows, scores, totals, summed, odds)

    def _of(self, array: mx.array, rows: list[int]) -> mx.array:
        return array if len(rows) == len(self.draws) else array[mx.array(rows)]
