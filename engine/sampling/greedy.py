"""The greedy choice: the first of the largest normalised scores, without normalising where that cannot matter.

The rule: with L the logarithm of the sum of exponentials, take the first index that attains the largest score, which
is x - L rounded. Rounding is monotonic, so that only a logit within one rounding step of the largest can reach the
same score. As L - max x lies between 0 and ln V, scores stay within 16 of zero, and a step there is at most 2^-20.
Hence, if no earlier index holds a logit within 2^-20 of the largest, the plain argmax is the answer; else L decides,
at the price of one exponential for each token of the vocabulary. Logits that close are rare.
Source: reference, autoregressive §3.2 (rounding ties).
"""

from __future__ import annotations

import mlx.core as mx

from engine.sampling.choice import Choice
from engine.sampling.columns import Columns, best_columns

ROUNDING_STEP = 2.0**-20
"""A rounding step below 16; for vocabularies of up to four million tokens."""


NEAR_COLUMNS = 8
"""So many columns may hold tokens that nearly tie before the rule has to decide for that alone."""


def choose_greedily(logits: mx.array) -> Choice:
    """Choose from `logits` [Q, V] float32; not sure where the rule must decide."""
    columns = Columns(logits, padding=-mx.inf)
    best, bound = best_columns(columns.maxima, NEAR_COLUMNS)
    ids, values = columns.ids(best), columns.take(best)
    tops = mx.max(values, axis=-1, keepdims=True)
    near = tops - ROUNDING_STEP
    plain, earliest = (mx.argmax(found, axis=-1, keepdims=True) for found in (values, values >= near))
    tokens = mx.take_along_axis(ids, plain, axis=-1)[:, 0]
    return Choice(tokens, (plain == earliest)[:, 0] & (bound < near[:, 0]))
