"""Log-probabilities of chosen tokens and of the most likely ones: found on the device, read with the tokens.

They are measured over the whole vocabulary, after processors and masks and before temperature, filters and curves.
On the way to the host floats travel as their bits, so that one array carries everything.
Source: reference, autoregressive §3.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.contracts.results import LEAST_LOGPROB, TokenLogprobs, TopLogprob
from engine.sampling.columns import Columns, best_columns

if TYPE_CHECKING:
    from engine.contracts.options import ResolvedOptions

Words: TypeAlias = NDArray[np.uint32]


def measure(scores: mx.array, tokens: mx.array, totals: mx.array, width: int) -> mx.array:
    """What `read` reads.

    Args:
        scores: [Q, V] float32, the largest of each row 0.
        tokens: the chosen ids [Q].
        totals: sums [Q] of the odds e^score.
        width: how many of the most likely tokens are wanted.

    Returns:
        [Q, 1 + 2 * min(width, V)] uint32: of the chosen token, then those of the most likely, then their ids.
    """
    likely = most_likely(scores, min(width, scores.shape[-1]))
    columns = mx.concatenate([tokens[:, None].astype(mx.uint32), likely], axis=-1)
    values = mx.take_along_axis(scores, columns, axis=-1) - mx.log(totals)[:, None]
    return mx.concatenate([mx.clip(values, LEAST_LOGPROB, 0.0).view(mx.uint32), likely], axis=-1)


def most_likely(scores: mx.array, count: int) -> mx.array:
    """Ids [Q, `count`] uint32 of the largest of `scores` [Q, V], best first, equals in the order of their ids.

    Those above the last of them lie in the columns with the best maxima, of which no more are needed than tokens. What
    equals the last may lie in any column.
    """
    if not count:
        return mx.zeros((scores.shape[0], 0), dtype=mx.uint32)
    columns = Columns(scores, padding=-mx.inf)
    best, _ = best_columns(columns.maxima, count)
    values = columns.take(best)
    order = mx.argsort(-values, axis=-1)[:, :count]
    ordered = mx.take_along_axis(values, order, axis=-1)
    last = ordered[:, -1:]
    above = mx.sum(ordered > last, axis=-1, keepdims=True)
    places = mx.arange(count)
    equals = mx.take_along_axis(_first_where(scores == last, count), mx.maximum(places - above, 0), axis=-1)
    return mx.where(places < above, mx.take_along_axis(columns.ids(best), order, axis=-1), equals)


def _first_where(wanted: mx.array, count: int) -> mx.array:
    """The first `count` ids [Q, `count`] uint32 at which `wanted` [Q, V] holds; where there are fewer, the last id."""
    end = wanted.shape[-1] - 1
    ids = Columns(mx.where(wanted, -mx.arange(end + 1), -end), padding=-end)
    best, _ = best_columns(ids.maxima, count)
    return mx.sort(-ids.take(best), axis=-1)[:, :count].astype(mx.uint32)


def read(words: Words, token: int, options: ResolvedOptions) -> TokenLogprobs:
    """What one row's caller asked for, from that row of `measure`.

    Raises:
        ValueError: `words` were measured for fewer tokens than `options` ask for.
    """
    width = (len(words) - 1) // 2
    values = words[: 1 + width].view(np.float32).tolist()
    ids = words[1 + width :].tolist()
    count = min(options.top_logprobs, width)
    top = [TopLogprob(candidate, value) for candidate, value in zip(ids[:count], values[1 : 1 + count], strict=True)]
    if count and token not in ids[:count]:
        top.append(TopLogprob(token, values[0]))
    return TokenLogprobs(logprob=values[0] if options.logprobs else None, top=tuple(top))
