"""Counts what the engine thread has done since it began. Written by that thread alone, read by anybody."""

from __future__ import annotations

from bisect import bisect_left

from engine.contracts.load import STEP_TOKEN_EDGES


class StepTally:
    """Counters that only grow, over all models that were resident."""

    __slots__ = ("classes", "generated_tokens", "packed_tokens", "prefilled_tokens", "steps")

    def __init__(self) -> None:
        """Nothing was done yet."""
        self.steps = 0
        self.classes = [0] * (len(STEP_TOKEN_EDGES) + 1)
        self.packed_tokens = 0
        self.prefilled_tokens = 0
        self.generated_tokens = 0

    def started(self, *, tokens: int, prompt_tokens: int) -> None:
        """A step of `tokens` has started, `prompt_tokens` of which belong to prompts."""
        self.steps += 1
        self.classes[bisect_left(STEP_TOKEN_EDGES, tokens)] += 1
        self.packed_tokens += tokens
        self.prefilled_tokens += prompt_tokens
