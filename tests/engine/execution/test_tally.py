"""Steps are counted in the classes that their tokens belong to."""

import pytest

from engine.contracts.load import STEP_TOKEN_EDGES, EngineLoad
from engine.execution.tally import StepTally


@pytest.mark.parametrize(
    ("tokens", "place"), [(1, 0), (2, 1), (8, 1), (9, 2), (16384, 12), (16385, 13), (10**6, len(STEP_TOKEN_EDGES))]
)
def test_an_edge_belongs_to_the_class_below_it(tokens, place):
    tally = StepTally()
    tally.started(tokens=tokens, prompt_tokens=tokens - 1)
    assert [index for index, count in enumerate(tally.classes) if count] == [place]
    assert (tally.steps, tally.packed_tokens, tally.prefilled_tokens) == (1, tokens, tokens - 1)


def test_a_share_of_no_memory_is_nothing_and_never_above_one():
    assert EngineLoad().state_share == 0
    assert EngineLoad(state_bytes=3, state_limit_bytes=2).state_share == 1
