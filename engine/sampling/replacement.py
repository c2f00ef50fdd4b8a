"""Curves that take the place of temperature and filters: which one a row asks for, and the scores it draws from.

Source: reference, autoregressive §3.2 (a curve goes before everything, a tone curve before the filters).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sampling.curve import curve_logits
from engine.sampling.hlg import tone_curve

if TYPE_CHECKING:
    import mlx.core as mx

    from engine.sampling.recipe import Recipe


def replaced(logprobs: mx.array, recipe: Recipe) -> mx.array:
    """The logits [..., V] that a row whose recipe `is_replaced` draws from, with the step's key and nothing else.

    Args:
        logprobs: [..., V] float32, normalised over V.
        recipe: what the row asks for.
    """
    options = recipe.options
    if options.curve:
        return curve_logits(logprobs, options.curve)
    if options.hlg is None:
        raise ValueError("the row asks for no curve")
    return tone_curve(logprobs, options.hlg, temperature=recipe.temperature)
