"""Filters over log-probabilities [V]: each removes tokens by setting them to -inf and keeps the shape.

A filter that is off is not called; at least one token always survives.
Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); reference, autoregressive §3.2.
"""

from __future__ import annotations

import math
from fractions import Fraction

import mlx.core as mx
import numpy as np

_REMOVED = -mx.inf
_WHOLE = 2.0**61
"""What a probability of 1 counts as. Sums of such integers are exact, and have room up to 4."""


def top_p(logprobs: mx.array, probability: float) -> mx.array:
    """Remove the least likely tokens whose mass together stays within 1 - `probability` (0 < p < 1).

    Tokens are lined up in ascending order, equals by id, and a token stays once the mass up to and including it is
    above 1 - p: of equal tokens at the cut the highest ids stay. Mass is counted in integers, since float32 sums lose
    the tail. This runs on the host and waits for `logprobs`; those of a row that is not finite come back as they are.
    """
    values = np.array(logprobs, dtype=np.float32)
    if not np.isfinite(values.max()):
        return logprobs
    ascending = np.sort(values)
    mass = np.cumsum(np.rint(np.exp(ascending.astype(np.float64)) * _WHOLE).astype(np.int64))
    # The decimal that the caller wrote: 1 - 0.9 in binary would keep a token too many where tokens are equal.
    removable = int((1 - Fraction(str(probability))) * int(mass[-1]))
    removed = int(np.searchsorted(mass, removable, side="right"))
    cut = ascending[removed]
    keep = values > cut
    equals = np.flatnonzero(values == cut)
    keep[equals[removed - int(np.searchsorted(ascending, cut)) :]] = True
    return mx.where(mx.array(keep), logprobs, _REMOVED)


def min_p(logprobs: mx.array, ratio: float, min_tokens_to_keep: int) -> mx.array:
    """Remove tokens less likely than `ratio` times the most likely one, keeping at least the given number."""
    threshold = mx.max(logprobs, axis=-1) + math.log(ratio)
    keep = logprobs >= threshold
    if min_tokens_to_keep > 1:
        kept = min(min_tokens_to_keep, logprobs.shape[-1])
        keep[mx.argpartition(-logprobs, kept - 1, axis=-1)[:kept]] = True
    return mx.where(keep, logprobs, _REMOVED)


def top_k(logprobs: mx.array, count: int) -> mx.array:
    """Keep exactly the `count` most likely tokens; a count of the vocabulary's size or more keeps all."""
    if count >= logprobs.shape[-1]:
        return logprobs
    keep = mx.zeros(logprobs.shape, dtype=mx.bool_)
    keep[mx.argpartition(-logprobs, count - 1, axis=-1)[:count]] = True
    return mx.where(keep, logprobs, _REMOVED)
