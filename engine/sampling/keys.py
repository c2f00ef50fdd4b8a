"""Random keys of sampling steps, derived from (seed, step) alone.

Because nothing else enters, a seeded request draws the same numbers alone, batched, or resumed.
"""

from __future__ import annotations

import mlx.core as mx

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


def step_seed(seed: int, step: int) -> int:
    """64-bit seed of completion index `step` (0 for token zero). Source: reference, autoregressive §3.3."""
    return (seed ^ ((step + 1) * _GOLDEN)) & _MASK64


def step_key(seed: int, step: int) -> mx.array:
    """Random key of completion index `step`."""
    return mx.random.key(step_seed(seed, step))


class KeySequence:
    """One request's keys, each made by splitting what is left. Source: reference, denoising-and-models §1.3.

    The keys are those of the library's own generator after `mx.random.seed(seed)`, which is never touched.
    """

    __slots__ = ("left",)

    def __init__(self, seed: int) -> None:
        """Start at a 64-bit `seed`."""
        self.left = mx.random.key(seed)

    def copy(self) -> KeySequence:
        """A sequence that makes the same keys from here on."""
        twin = KeySequence.__new__(KeySequence)
        twin.left = self.left
        return twin

    def next_key(self) -> mx.array:
        """The key of the next draw."""
        self.left, drawn = mx.random.split(self.left)
        return drawn
