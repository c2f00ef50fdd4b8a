"""Chooses one token for each row of a step: greedy rows together, sampled rows by their own key and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.exponential import log_sum_exp
from engine.sampling import filters
from engine.sampling.keys import step_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.options import ResolvedOptions

MIN_TEMPERATURE = 1e-5
"""Below this, dividing log-probabilities would overflow 16-bit numbers; the choice equals greedy."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw: its options and the completion index of the token to be chosen."""

    options: ResolvedOptions
    step: int


def sample(logits: mx.array, draws: Sequence[Draw], *, composed: bool = False) -> mx.array:
    """Choose a token for each row.

    Args:
        logits: [R, V], one row for each draw.
        draws: options and step of each row, in the same order.
        composed: avoid the library's exponential.

    Returns:
        Token ids [R] uint32, unevaluated.

    Source: reference, autoregressive §3.2 (order of filters) and §3.3 (keys).
    """
    logprobs = log_softmax(logits, composed=composed)
    greedy = [is_greedy(draw.options) for draw in draws]
    if all(greedy):
        return mx.argmax(logprobs, axis=-1)
    return mx.stack(
        [
            mx.argmax(row, axis=-1) if plain else _draw(row, draw)
            for row, draw, plain in zip(logprobs, draws, greedy, strict=True)
        ]
    ).astype(mx.uint32)


def log_softmax(logits: mx.array, *, composed: bool = False) -> mx.array:
    """Log-probabilities [..., V] of `logits`, in float32: 16-bit sums over a vocabulary lose too much."""
    wide = logits.astype(mx.float32)
    return wide - log_sum_exp(wide, composed=composed)


def is_greedy(options: ResolvedOptions) -> bool:
    """Whether the choice is the most likely token."""
    return options.temperature < MIN_TEMPERATURE


def _draw(logprobs: mx.array, draw: Draw) -> mx.array:
    options = draw.options
    if 0 < options.top_p < 1:
        logprobs = filters.top_p(logprobs, options.top_p)
    if options.min_p > 0:
        logprobs = filters.min_p(logprobs, options.min_p, options.min_tokens_to_keep)
    if options.top_k > 0:
        logprobs = filters.top_k(logprobs, options.top_k)
    return mx.random.categorical(logprobs / options.temperature, key=step_key(options.seed, draw.step))
