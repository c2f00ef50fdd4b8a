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
