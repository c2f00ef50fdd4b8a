"""The step policy: who takes part, in which order, within which budget."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.execution.scheduler import plan_step


@dataclass(frozen=True)
class FakeRow:
    name: int
    prefilling: bool
    width: int

    @property
    def is_prefilling(self):
        return self.prefilling

    @property
    def next_width(self):
        return self.width


def decoding(name):
    return FakeRow(name, prefilling=False, width=1)


def prefilling(name, width):
    return FakeRow(name, prefilling=True, width=width)


def test_every_decoding_row_steps_beside_a_prefilling_one():
    rows = [prefilling(0, 64), decoding(1), decoding(2)]
    assert plan_step(rows, prefill_budget_tokens=64) == [rows[1], rows[2], rows[0]]


def test_an_explicit_chunk_wider_than_the_budget_still_moves():
    assert plan_step([prefilling(0, 500)], prefill_budget_tokens=64) == [prefilling(0, 500)]


def test_prompts_share_the_budget_in_order_of_admission():
    rows = [prefilling(0, 20), prefilling(1, 30), prefilling(2, 20), prefilling(3, 1)]
    assert plan_step(rows, prefill_budget_tokens=64) == rows[:2]


@given(st.lists(st.builds(FakeRow, st.integers(), st.booleans(), st.integers(1, 90))), st.integers(1, 128))
def test_a_step_never_passes_its_budget_unless_one_chunk_alone_does(rows, budget):
    chosen = plan_step(rows, prefill_budget_tokens=budget)
    widths = [row.width for row in chosen if row.prefilling]
    assert sum(widths) <= budget or len(widths) == 1
    assert [row for row in chosen if not row.prefilling] == [row for row in rows if not row.prefilling]
    if any(row.prefilling for row in rows):
        assert widths
