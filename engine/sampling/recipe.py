"""What one row's options ask of the sampler, prepared once so that a step does little. Touches no array of the device.

A `Recipe` belongs to a row for its life; a `Draw` is one token to be chosen by it. Numbers that float32 cannot hold are
brought to the nearest that it can, so that no finite option makes a score infinite or NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.filters import min_p_score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.options import ResolvedOptions

MIN_TEMPERATURE = 1e-5
"""Below this, dividing log-probabilities would overflow 16-bit numbers; the choice equals greedy."""

SHALLOW_TOKENS = 128
"""The largest top-k for which the best tokens are sorted alone."""

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Penalty:
    """One penalty and the number of newest tokens that it sees."""

    value: float
    window_tokens: int


class Recipe:
    """One row's options, in the form that steps use. What is off is None, or empty."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "frequency",
        "min_p_score",
        "options",
        "presence",
        "protected",
        "repetition",
        "temperature",
        "top_p",
    )

    def __init__(self, options: ResolvedOptions) -> None:
        self.options = options
        self.temperature = min(options.temperature, LARGEST)
        self.top_p = options.top_p if 0 < options.top_p < 1 else math.inf
        self.min_p_score = float(min_p_score(options.min_p)) if options.min_p > 0 else -math.inf
        self.protected = tuple(dict.fromkeys(options.xtc_special_tokens))
        self.bias_ids = np.array([token for token, _ in options.logit_bias], dtype=np.int32)
        biases = np.array([bias for _, bias in options.logit_bias], dtype=np.float64)
        self.bias_values = np.clip(biases, -LARGEST, LARGEST).astype(np.float32)
        self.repetition = _penalty(
            max(options.repetition_penalty, SMALLEST), options.repetition_context_size, neutral=1.0
        )
        self.presence = _penalty(options.presence_penalty, options.presence_context_size, neutral=0.0)
        self.frequency = _penalty(options.frequency_penalty, options.frequency_context_size, neutral=0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the most likely token."""
        return self.options.temperature < MIN_TEMPERATURE and not self.options.curve

    @property
    def is_replaced(self) -> bool:
        """Whether a curve stands in for temperature and filters."""
        return bool(self.options.curve) or (self.options.hlg is not None and not self.is_greedy)

    @property
    def excludes(self) -> bool:
        """Whether XTC is on."""
        return self.options.xtc_probability > 0

    @property
    def filters_by_mass(self) -> bool:
        """Whether top-p or min-p is on."""
        return self.top_p < math.inf or self.min_p_score > -math.inf

    @property
    def needs_order(self) -> bool:
        """Whether what is kept depends on more than a token's own score."""
        return bool(self.top_p < math.inf or self.options.top_k or self.options.min_tokens_to_keep > 1)

    @property
    def is_shallow(self) -> bool:
        """Whether so few tokens are kept at most that a few columns hold them."""
        return 0 < self.options.top_k <= SHALLOW_TOKENS

    @property
    def goes_deep(self) -> bool:
        """Whether top-p alone bounds how many tokens are kept, so that its cut may lie anywhere."""
        return self.top_p < math.inf and not self.is_shallow

    @property
    def needs_total(self) -> bool:
        """Whether the sum of all odds matters: for the mass that is kept, or to tell probabilities."""
        drawn = not self.is_greedy and (self.top_p < math.inf or self.excludes)
        return drawn or self.is_replaced or self.tells

    @property
    def tells(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.options.logprobs or self.options.top_logprobs > 0

    @property
    def processes(self) -> bool:
        """Whether some processor is on."""
        return bool(len(self.bias_ids) or self.history_tokens)

    @property
    def history_tokens(self) -> int:
        """How many of the newest tokens some penalty sees."""
        penalties = (self.repetition, self.presence, self.frequency)
        return max((penalty.window_tokens for penalty in penalties if penalty is not None), default=0)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen.

    Attributes:
        recipe: by what rules.
        step: completion index of the token.
        history: the newest tokens before it that the host knows, oldest first; `recipe.history_tokens` are enough.
        unread: the place, among tokens that only the device knows, of the one that follows `history`.
    """

    recipe: Recipe
    step: int
    history: Sequence[int] = field(default=())
    unread: int | None = None


def _penalty(value: float, window_tokens: int, *, neutral: float) -> Penalty | None:
    if value == neutral or not window_tokens:
        return None
    return Penalty(float(np.clip(value, -LARGEST, LARGEST)), window_tokens)
