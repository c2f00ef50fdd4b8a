"""One block under revision: the canvas that is fed to the next pass, and what is settled of it. Lives on the device.

Shapes: L positions, V vocabulary, H hidden size. Belongs to one row and to the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine.generation.denoising_schedule import temperature
from engine.sampling.canvas import (
    Proposal,
    accept_confident,
    accept_within_entropy,
    count_unchanged,
    token_entropy,
)

if TYPE_CHECKING:
    from engine.contracts.denoising import DenoisingPlan
    from engine.sampling.keys import KeySequence


MOST_PASSES: Final = 2**31 - 1
"""What int32 counts to; no block lives to see as many."""


@dataclass(slots=True)
class CanvasBlock:
    """What passes over one canvas have left.

    Attributes:
        current: int32 [1, L], the input of the next pass.
        draft: int32 [1, L], the token with which each position was accepted; noise where none was.
        revealed: bool [1, L], the positions that were accepted.
        keys: makes the keys of noise; the row's own.
        feedback: soft embeddings [1, L, H] of the pass before; None before the first.
        proposed: int32 [1, L], the proposal of the pass before; None before the first.
        unchanged: int32 [], how many proposals before the newest one were equal to it; None before the first.
        passes: how many have been made.
    """

    current: mx.array
    draft: mx.array
    revealed: mx.array
    keys: KeySequence
    feedback: mx.array | None = None
    proposed: mx.array | None = None
    unchanged: mx.array | None = None
    passes: int = 0

    @classmethod
    def of_noise(cls, length: int, vocab_size: int, keys: KeySequence) -> CanvasBlock:
        """A canvas of `length` random tokens; the first draw of a block."""
        noise = _noise(length, vocab_size, keys)
        return cls(current=noise, draft=noise, revealed=mx.zeros((1, length), dtype=mx.bool_), keys=keys)

    @property
    def length(self) -> int:
        """Positions."""
        return self.current.shape[1]


@dataclass(frozen=True, slots=True)
class Revision:
    """The outcome of one pass, still on the device.

    `tokens` [1, L] are what the block becomes if it ends here, `flags` [2] say whether all scores are numbers and
    whether the block ends early. `probabilities` [1, L, V] are what feedback is made of, if there is another pass.
    """

    tokens: mx.array
    flags: mx.array
    probabilities: mx.array | None


def revise(block: CanvasBlock, logits: mx.array, plan: DenoisingPlan) -> Revision:
    """Take the `logits` [1, L, V] of a pass over `block`, and make the canvas of the next one.

    The last pass of a block draws nothing and accepts nothing: its proposal is what the block becomes.
    """
    passes_left = plan.max_denoising_steps - block.passes
    block.passes += 1
    proposal = Proposal.of(logits, temperature(plan, passes_left))
    if passes_left == 1:
        return Revision(proposal.tokens, mx.stack([proposal.is_finite, mx.array(True)]), None)
    noise = _noise(block.length, logits.shape[-1], block.keys)
    rule = _by_entropy if plan.sampler == "entropy-bound" else _by_confidence
    ends, probabilities = rule(block, proposal, plan, noise)
    if plan.stability_threshold is not None and plan.confidence_threshold is not None:
        ends = ends | _is_settled(block, proposal, plan.stability_threshold, plan.confidence_threshold)
    return Revision(proposal.tokens, mx.stack([proposal.is_finite, ends]), probabilities)


def _by_confidence(
    block: CanvasBlock, proposal: Proposal, plan: DenoisingPlan, noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Reveal what is sure enough, for good; the block ends when all of it is."""
    accepted = accept_confident(proposal.confidence(), ~block.revealed, plan.threshold)
    block.draft = mx.where(accepted, proposal.tokens, block.draft)
    block.revealed = block.revealed | accepted
    block.current = mx.where(block.revealed, block.draft, noise)
    return mx.all(block.revealed), mx.softmax(proposal.scores, axis=-1, precise=True)


def _by_entropy(
    block: CanvasBlock, proposal: Proposal, plan: DenoisingPlan, noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Keep what is sure enough for one pass; nothing stays revealed, so nothing ends the block."""
    log_probabilities = proposal.log_probabilities()
    probabilities = mx.exp(log_probabilities)
    accepted = accept_within_entropy(token_entropy(log_probabilities, probabilities), plan.entropy_bound)
    block.revealed = accepted
    block.current = mx.where(accepted, proposal.tokens, noise)
    return mx.array(False), probabilities


def _is_settled(block: CanvasBlock, proposal: Proposal, canvases: int, least_entropy: float) -> mx.array:
    """Whether the proposal equals the last `canvases` ones and is sure of itself, as a bool []."""
    block.unchanged = count_unchanged(proposal.tokens, block.proposed, block.unchanged)
    block.proposed = proposal.tokens
    log_probabilities = proposal.log_probabilities()
    entropy = token_entropy(log_probabilities, mx.exp(log_probabilities))
    return (block.unchanged >= min(canvases, MOST_PASSES)) & (mx.mean(entropy) < least_entropy)


def _noise(length: int, vocab_size: int, keys: KeySequence) -> mx.array:
    """Uniform ids, int32 [1, L]."""
    return mx.random.randint(0, vocab_size, (1, length), dtype=mx.int32, key=keys.next_key())
