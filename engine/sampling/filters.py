"""Filters over log-probabilities [V]: each removes tokens by setting them to -inf and keeps the shape.

A filter that is off is not called; at least one token always survives.
Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); reference, autoregressive §3.2.
"""

from __future__ import annotations

import math

import mlx.core as mx

_REMOVED = -mx.inf


def top_p(logprobs: mx.array, probability: float) -> mx.array:
    """Keep the smallest set of most likely tokens whose mass exceeds `probability` (0 < p < 1)."""
    ascending = mx.argsort(logprobs, axis=-1)
    mass = mx.cumsum(mx.exp(logprobs[ascending]), axis=-1)
    keep_sorted = mass > 1 - probability
    keep_sorted[-1] = True
    keep = mx.zeros(logprobs.shape, dtype=mx.bool_)
    keep[ascending] = keep_sorted
    return mx.where(keep, logprobs, _REMOVED)


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
