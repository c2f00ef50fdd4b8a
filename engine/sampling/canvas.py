"""Which positions of a canvas a pass accepts: by confidence, or by entropy. Every array has one canvas as its row.

Shapes: L positions, V vocabulary. Entropies are in nats. Everything is float32, lazy, and without a random number.
Source: reference, denoising-and-models §1.5 to §1.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

LEAST_TEMPERATURE: Final = 1e-5
"""Below this, bounded logits would leave the range of float32; the likeliest token has all of the mass by then."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the denoiser proposes in one pass.

    `scores` [1, L, V] are logits divided by the pass's temperature, `tokens` [1, L] int32 the likeliest ids, and
    `log_mass` [1, L] the logarithm of the sum of exponentials of each position's scores.
    """

    scores: mx.array
    tokens: mx.array
    log_mass: mx.array

    @classmethod
    def of(cls, logits: mx.array, temperature: float) -> Proposal:
        """The proposal of `logits` [1, L, V]. They are divided: a product with the inverse is off by a bit at times."""
        scores = logits / max(temperature, LEAST_TEMPERATURE)
        tokens = mx.argmax(scores, axis=-1).astype(mx.int32)
        return cls(scores, tokens, mx.logsumexp(scores, axis=-1))

    @property
    def is_finite(self) -> mx.array:
        """Whether every score is a number, as a bool []."""
        return mx.isfinite(mx.sum(self.log_mass))

    def confidence(self) -> mx.array:
        """Probability [1, L] of each position's token."""
        return mx.exp(mx.max(self.scores, axis=-1) - self.log_mass)

    def log_probabilities(self) -> mx.array:
        """Log-probabilities [1, L, V]."""
        return self.scores - self.log_mass[..., None]


def accept_confident(confidence: mx.array, unrevealed: mx.array, threshold: float) -> mx.array:
    """The unrevealed positions whose confidence reaches `threshold`; the surest of them where none does.

    Args:
        confidence: [1, L].
        unrevealed: bool [1, L].
        threshold: a probability, compared with >=.

    Returns:
        bool [1, L]. Of equally sure positions the first is taken.
    """
    reached = unrevealed & (confidence >= threshold)
    surest = mx.argmax(mx.where(unrevealed, confidence, -mx.inf), axis=-1, keepdims=True)
    forced = unrevealed & (mx.arange(confidence.shape[-1])[None] == surest)
    return mx.where(mx.any(reached, axis=-1, keepdims=True), reached, forced)


def accept_within_entropy(entropy: mx.array, bound: float) -> mx.array:
    """The positions of least entropy, as long as the sum of all but the largest of them stays within `bound`.

    Args:
        entropy: [1, L].
        bound: nats, compared with <=.

    Returns:
        bool [1, L]; the position of least entropy is always taken.
    """
    order = mx.argsort(entropy, axis=-1)
    ordered = mx.take_along_axis(entropy, order, axis=-1)
    within = mx.cumsum(ordered, axis=-1) - mx.cummax(ordered, axis=-1) <= bound
    return mx.put_along_axis(mx.zeros_like(within), order, within, axis=-1)


def token_entropy(log_probabilities: mx.array, probabilities: mx.array) -> mx.array:
    """Entropy [1, L] of each position, from both forms [1, L, V] of its distribution."""
    return -mx.sum(probabilities * log_probabilities, axis=-1)


def count_unchanged(tokens: mx.array, before: mx.array | None, count: mx.array | None) -> mx.array:
    """How many proposals, without a gap, were equal to the newest one.

    Args:
        tokens: int32 [1, L], the newest proposal.
        before: int32 [1, L], the one before; None for the first.
        count: int32 [], what this returned for `before`.

    Returns:
        int32 [].
    """
    if before is None or count is None:
        return mx.array(0)
    return mx.where(mx.all(tokens == before), count + 1, 0)
