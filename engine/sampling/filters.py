"""Filters over log-probabilities [V]: each removes tokens by setting them to -inf and keeps the shape.

A filter that is off is not called; at least one token always survives.
Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); reference, autoregressive §3.2.
"""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx

_REMOVED = -mx.inf
_HEAD_TOKENS = 1024


def top_p(logprobs: mx.array, probability: float, *, at_most: int = 0) -> mx.array:
    """Keep the smallest set of most likely tokens whose mass reaches `probability` (0 < p < 1), and their equals.

    Only a head of the distribution is sorted where it holds that mass, which the host must look at; `at_most` (0 is
    off) tells that no more than so many tokens survive the filters to come, so that a longer head never matters.
    """
    size = logprobs.shape[-1]
    least, mass = _cut(logprobs, probability, min(_HEAD_TOKENS, size))
    if size > _HEAD_TOKENS and not 0 < at_most <= _HEAD_TOKENS and cast("float", mass.item()) < probability:
        least, _ = _cut(logprobs, probability, size)
    return mx.where(logprobs >= least, logprobs, _REMOVED)


def _cut(logprobs: mx.array, probability: float, head: int) -> tuple[mx.array, mx.array]:
    """The least log-probability that top-p keeps among the `head` most likely tokens, and the mass of those."""
    descending = -mx.sort(-mx.topk(logprobs, head, axis=-1), axis=-1)
    mass = mx.cumsum(mx.exp(descending), axis=-1)
    # A token is needed while those before it do not hold the mass.
    needed = mx.minimum(mx.sum(mass < probability), head - 1)
    return descending[needed], mass[-1]


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
