"""Sums over a vocabulary, and log-probabilities."""

from __future__ import annotations

import mlx.core as mx

from engine.ops.exponential import LOG2_E, log_sum_exp

_STRETCHES = 64


def odds_of(scores: mx.array, *, composed: bool) -> mx.array:
    """e^score of `scores` [..., V] float32; `composed` avoids the library's exponential."""
    return mx.power(2.0, scores * LOG2_E) if composed else mx.exp(scores)


def total(odds: mx.array) -> mx.array:
    """The sum [...] of `odds` [..., V] over the last axis.

    It is taken in stretches, so that its rounding error grows with a 64th of the vocabulary.
    """
    vocabulary = odds.shape[-1]
    whole = vocabulary - vocabulary % _STRETCHES
    stretches = odds[..., :whole].reshape(*odds.shape[:-1], _STRETCHES, whole // _STRETCHES)
    return mx.sum(mx.sum(stretches, axis=-2), axis=-1) + mx.sum(odds[..., whole:], axis=-1)


def log_softmax(logits: mx.array, *, composed: bool = False) -> mx.array:
    """Log-probabilities [..., V] of `logits`, in float32: 16-bit sums over a vocabulary lose too much."""
    wide = logits.astype(mx.float32)
    return wide - log_sum_exp(wide, composed=composed)
