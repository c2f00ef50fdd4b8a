"""Draws one token for each row of a step: all rows at once, each by its own key, filters and temperature.

The draw is the categorical one: the largest sum of a token's score over the temperature and its Gumbel noise, taken
over what the filters keep. Where `engine.sampling.cuts` leaves in doubt whether the drawn token is kept, the row is not
sure, and `draw_exactly` decides it once the host has time.
Source: Gumbel 1954 (the noise); reference, autoregressive §3.2 and §3.3 (keys, XTC's split).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from engine.sampling import filters
from engine.sampling.choice import Choice
from engine.sampling.columns import Columns, best_columns
from engine.sampling.cuts import DOUBT, Cuts, find_cuts, find_cuts_with_exclusion
from engine.sampling.keys import step_key
from engine.sampling.recipe import LARGEST, SMALLEST
from engine.sampling.replacement import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.sampling.recipe import Draw


PROMISING_COLUMNS = 128
"""About 16 columns promise more than the largest sum, and seldom more than a few times as many."""
LEAST_LEAD = 1e-4
"""More than the rounding by which a column may promise too little."""


def draw(scores: mx.array, draws: Sequence[Draw], totals: mx.array) -> Choice:
    """Draw without XTC.

    Args:
        scores: [Q, V] float32, the largest of each row 0.
        draws: one for each row.
        totals: sums [Q] of the odds; read where top-p is on.
    """
    cuts = _cuts(scores, draws, totals)
    return _drawn(scores, [step_key(one.recipe.options.seed, one.step) for one in draws], draws, cuts)


def draw_by_mass(scores: mx.array, draws: Sequence[Draw], totals: mx.array, odds: mx.array) -> Choice:
    """Draw where top-p is on and its cut may lie anywhere; see `draw`.

    The mass above the drawn token tells whether it is kept. If it is not, the next best one is taken instead, which
    hardly ever fails too: so the token is seldom wrong, even where the cut is not known.

    Args:
        scores: [Q, V] float32.
        draws: one for each row.
        totals: sums [Q] of the odds.
        odds: e^score [Q, V].
    """
    share = mx.maximum(mx.array([one.recipe.top_p for one in draws]) * totals * (1 + DOUBT), SMALLEST)

    def is_gone(score: mx.array) -> mx.array:
        return mx.sum(mx.where(scores > score, odds, 0.0), axis=-1, keepdims=True) >= share[:, None]

    keys = [step_key(one.recipe.options.seed, one.step) for one in draws]
    return _drawn(scores, keys, draws, _cuts(scores, draws, totals), is_gone)


def draw_with_exclusion(scores: mx.array, draws: Sequence[Draw], totals: mx.array) -> Choice:
    """Draw with XTC in every row; see `draw`."""
    halves = [_split(one) for one in draws]
    protected = np.zeros(scores.shape, dtype=np.bool_)
    for row, one in enumerate(draws):
        protected[row, list(one.recipe.protected)] = True
    exposed = mx.array(~protected)
    cuts, left = find_cuts_with_exclusion(
        scores,
        [one.recipe for one in draws],
        totals,
        chances=mx.stack([chance for _, chance in halves]),
        exposed=exposed,
    )
    return _drawn(left, [key for key, _ in halves], draws, cuts)


def draw_replaced(logprobs: mx.array, draws: Sequence[Draw]) -> Choice:
    """Draw from what curves make of `logprobs` [Q, V] float32, normalised; each row has its own curve."""
    tokens = mx.stack(
        [
            mx.random.categorical(replaced(row, one.recipe), key=step_key(one.recipe.options.seed, one.step))
            for row, one in zip(logprobs, draws, strict=True)
        ]
    )
    return Choice(tokens, mx.ones(tokens.shape, dtype=mx.bool_))


def draw_exactly(scores: mx.array, one: Draw) -> int:
    """The token of one row by the filters' own rules; waits for `scores` [V], whose largest is 0."""
    options, recipe = one.recipe.options, one.recipe
    left = np.array(scores)
    if recipe.top_p < 1:
        left = filters.top_p(left, recipe.top_p)
    if options.min_p > 0:
        left = filters.min_p(left, options.min_p, options.min_tokens_to_keep)
    key = step_key(options.seed, one.step)
    if recipe.excludes:
        key, chance = _split(one)
        if cast("float", chance.item()) <= np.float32(options.xtc_probability):
            left = filters.xtc(left, options.xtc_threshold, recipe.protected)
    if options.top_k:
        left = filters.top_k(left, options.top_k)
    noise = np.maximum(np.array(mx.random.gumbel(left.shape, key=key)), -LARGEST)
    return int(np.argmax(left / np.float32(recipe.temperature) + noise))


def _cuts(scores: mx.array, draws: Sequence[Draw], totals: mx.array) -> Cuts:
    """Only rows in which tokens depend on each other need them in order."""
    recipes = [one.recipe for one in draws]
    by_ratio = np.array([recipe.min_p_score for recipe in recipes], dtype=np.float32)
    # Min-p keeps what equals its cut.
    possible, certain = mx.array(by_ratio), mx.array(np.nextafter(by_ratio, np.float32(-np.inf)))
    for is_shallow in (True, False):
        rows = [row for row, recipe in enumerate(recipes) if recipe.needs_order and recipe.is_shallow is is_shallow]
        if rows:
            places = mx.array(rows)
            own = scores if len(rows) == len(draws) else scores[places]
            found = find_cuts(own, [recipes[row] for row in rows], totals[places])
            possible[places], certain[places] = found.possible, found.certain
    return Cuts(possible, certain)


def _drawn(
    scores: mx.array,
    keys: Sequence[mx.array],
    draws: Sequence[Draw],
    cuts: Cuts,
    is_gone: Callable[[mx.array], mx.array] | None = None,
) -> Choice:
    """The largest sum, sought in the columns that promise most: their largest score with their largest noise.

    `is_gone` tells of a score [Q, 1] of each row whether the token that has it is removed; then the second largest sum
    is taken.
    """
    temperatures = mx.array([one.recipe.temperature for one in draws], dtype=mx.float32)[:, None]
    possible = cuts.possible[:, None]

    def summed(score: mx.array, lot: mx.array) -> mx.array:
        return mx.where(score < possible, -mx.inf, score / temperatures - mx.log(-mx.log(lot)))

    kept = Columns(scores, padding=-mx.inf)
    lots = Columns(mx.stack([mx.random.uniform(shape=scores.shape[1:], key=key) for key in keys]), padding=0.0)
    columns, bound = best_columns(summed(kept.maxima, lots.maxima), PROMISING_COLUMNS)
    left = kept.take(columns)
    sums = summed(left, lots.take(columns))
    place = mx.argmax(sums, axis=-1, keepdims=True)
    if is_gone is not None:
        second = mx.argmax(mx.put_along_axis(sums, place, mx.array(-mx.inf), axis=-1), axis=-1, keepdims=True)
        place = mx.where(is_gone(mx.take_along_axis(left, place, axis=-1)), second, place)
    token, score, largest = (mx.take_along_axis(of, place, axis=-1)[:, 0] for of in (kept.ids(columns), left, sums))
    return Choice(token, (score > cuts.certain) & (largest > bound + LEAST_LEAD))


def _split(one: Draw) -> tuple[mx.array, mx.array]:
    """XTC's halves of the step's key: the key that draws the token, and the number that decides on the exclusion."""
    first, second = mx.random.split(step_key(one.recipe.options.seed, one.step))
    return second, mx.random.uniform(key=first)
