"""The rules of the filters, exactly: over one row's scores [V] on the host, each sets removed tokens to -inf.

Scores are natural logarithms of odds: their largest is 0, and what they are relative to does not matter. A filter that
is off is not called; at least one token always survives. `cuts` decides most rows on the device; these decide the rest,
and say what is right. Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); p-e-w 2024 (XTC); reference,
autoregressive §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Scores: TypeAlias = NDArray[np.float32]

_REMOVED = np.float32(-np.inf)
_WHOLE = 2.0**61
"""What a probability of 1 counts as. Sums of such integers are exact, and have room up to 4."""


def top_p(scores: Scores, probability: float) -> Scores:
    """Remove the least likely tokens whose mass together stays within 1 - `probability` (0 < p < 1).

    Tokens are lined up in ascending order, equals by id, and a token stays once the mass up to and including it is
    above 1 - p: of equal tokens at the cut the highest ids stay. Mass is counted in integers, since float sums lose
    the tail.
    """
    ascending = np.sort(scores)
    odds = np.exp(ascending.astype(np.float64))
    mass = np.cumsum(np.rint(odds / odds.sum() * _WHOLE).astype(np.int64))
    # The decimal that the caller wrote: 1 - 0.9 in binary would keep a token too many where tokens are equal.
    removable = int((1 - Fraction(str(probability))) * int(mass[-1]))
    removed = int(np.searchsorted(mass, removable, side="right"))
    cut = ascending[removed]
    keep = scores > cut
    equals = np.flatnonzero(scores == cut)
    keep[equals[removed - int(np.searchsorted(ascending, cut)) :]] = True
    return np.where(keep, scores, _REMOVED)


def min_p(scores: Scores, ratio: float, min_tokens_to_keep: int) -> Scores:
    """Remove tokens less likely than `ratio` times the most likely one, keeping at least the given number."""
    keep = scores >= min_p_score(ratio)
    if min_tokens_to_keep > 1:
        keep |= _best(scores, min_tokens_to_keep)
    return np.where(keep, scores, _REMOVED)


def min_p_score(ratio: float) -> np.float32:
    """The score of a token that is `ratio` times as likely as the most likely one."""
    return np.float32(math.log(ratio))


def xtc(scores: Scores, threshold: float, protected: Sequence[int]) -> Scores:
    """Remove all tokens more likely than the least likely of those above `threshold`, but for `protected` ids.

    Probabilities are those among what is left. Where fewer than two are above the threshold, none is removed.
    """
    odds = np.exp(scores.astype(np.float64))
    above = odds > threshold * odds.sum()
    if not above.any():
        return scores
    removed = odds > odds[above].min()
    removed[list(protected)] = False
    return np.where(removed, _REMOVED, scores)


def top_k(scores: Scores, count: int) -> Scores:
    """Keep the `count` most likely tokens, of equals the lowest ids; the vocabulary's size or more keeps all."""
    return np.where(_best(scores, count), scores, _REMOVED)


def _best(scores: Scores, count: int) -> NDArray[np.bool_]:
    """Which are the `count` most likely, of equals those with the lowest ids."""
    if count >= scores.size:
        return np.ones(scores.shape, dtype=np.bool_)
    last = np.partition(scores, scores.size - count)[scores.size - count]
    best: NDArray[np.bool_] = scores > last
    best[np.flatnonzero(scores == last)[: count - int(best.sum())]] = True
    return best
