"""Canvas lengths and temperatures of a plan, against what the reference says in words."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.denoising import DenoisingPlan
from engine.contracts.option_groups import DenoisingOptions
from engine.generation.denoising_schedule import canvas_tokens, plan_denoising, temperature

LENGTHS = st.none() | st.integers(1, 400)


def test_the_defaults_are_the_reference_s():
    assert plan_denoising(None, canvas_length=256) == DenoisingPlan(
        max_canvas_length=256,
        min_canvas_length=64,
        full_canvas=False,
        max_denoising_steps=48,
        sampler="confidence-threshold",
        threshold=0.9,
        entropy_bound=0.1,
        t_min=0.4,
        t_max=0.8,
        stability_threshold=None,
        confidence_threshold=None,
    )


def test_what_a_caller_asks_for_is_planned():
    asked = DenoisingOptions(
        max_denoising_steps=5,
        min_canvas_length=3,
        max_canvas_length=9,
        full_canvas=False,
        sampler="entropy-bound",
        threshold=0.0,
        entropy_bound=0.0,
        t_min=0.1,
        t_max=0.2,
        stability_threshold=0,
        confidence_threshold=0.0,
    )
    plan = plan_denoising(asked, canvas_length=256)
    assert asdict(plan) == asdict(asked)


@given(LENGTHS, LENGTHS, st.booleans(), st.integers(1, 300), st.integers(1, 600))
def test_every_canvas_is_as_long_as_the_reference_says(shortest, longest, full, model_canvas, remaining):
    if shortest is not None and longest is not None and shortest > longest:
        shortest = longest
    asked = DenoisingOptions(min_canvas_length=shortest, max_canvas_length=longest, full_canvas=full)
    found = canvas_tokens(plan_denoising(asked, canvas_length=model_canvas), remaining)
    most = model_canvas if full else min(model_canvas, longest or model_canvas)
    least = min(most, shortest or 64)
    assert found == (model_canvas if full else min(most, max(remaining, least)))


@pytest.mark.parametrize(("remaining", "length"), [(10, 64), (64, 64), (65, 65), (300, 256)])
def test_a_short_answer_still_takes_the_shortest_canvas_and_a_long_one_several(remaining, length):
    assert canvas_tokens(plan_denoising(None, canvas_length=256), remaining) == length


def test_passes_cool_down_from_the_hottest_without_ever_reaching_the_coolest():
    plan = plan_denoising(DenoisingOptions(max_denoising_steps=4), canvas_length=8)
    found = [temperature(plan, passes_left) for passes_left in (4, 3, 2, 1)]
    assert found == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert found[0] == 0.8
