"""What the page says of a goal agrees with itself."""

import pytest

from benchmarks.serving.goals import Goal


@pytest.mark.parametrize(
    ("value", "bound", "measured", "verdict"),
    [
        (0.9778, 0.98, "0.978", "missed"),
        (0.97996, 0.98, "0.97996", "missed"),
        (0.98, 0.98, "0.98", "met"),
        (0.9822, 0.98, "0.982", "met"),
        (0.97, 0.98, "0.97", "missed"),
        (1.234, None, "1.23", ""),
        (None, 0.98, "-", "not measured"),
    ],
)
def test_a_value_never_reads_like_a_bound_that_it_is_not(value, bound, measured, verdict):
    goal = Goal(name="a rate", value=value, bound=bound)
    assert (goal.measured, goal.verdict) == (measured, verdict)
