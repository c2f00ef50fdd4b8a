"""How large a canvas is and how hot each pass over it: pure arithmetic on a plan. Units: tokens and passes.

Source: reference, denoising-and-models §1.2 and §1.4.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from engine.contracts.denoising import DenoisingPlan

if TYPE_CHECKING:
    from engine.contracts.option_groups import DenoisingOptions

MIN_CANVAS_TOKENS: Final = 64


def plan_denoising(options: DenoisingOptions | None, *, canvas_length: int) -> DenoisingPlan:
    """The plan for `options` over a model whose canvas has `canvas_length` positions; None asks for the defaults."""
    asked = {} if options is None else {field.name: getattr(options, field.name) for field in fields(options)}
    longest, shortest = asked.pop("max_canvas_length", None), asked.pop("min_canvas_length", None)
    if asked.get("full_canvas"):
        longest = None
    longest = canvas_length if longest is None else min(canvas_length, longest)
    return DenoisingPlan(
        max_canvas_length=longest,
        min_canvas_length=min(longest, MIN_CANVAS_TOKENS if shortest is None else shortest),
        **{name: value for name, value in asked.items() if value is not None},
    )


def canvas_tokens(plan: DenoisingPlan, remaining_tokens: int) -> int:
    """Positions of the next canvas, when so many tokens of the budget remain."""
    if plan.full_canvas:
        return plan.max_canvas_length
    return min(plan.max_canvas_length, max(remaining_tokens, plan.min_canvas_length))


def temperature(plan: DenoisingPlan, passes_left: int) -> float:
    """What the logits of a pass are divided by; `passes_left` counts it, so the first pass is the hottest."""
    return plan.t_min + (plan.t_max - plan.t_min) * (passes_left / plan.max_denoising_steps)
