"""The account of a row, by a clock that the test sets: what each time and rate means, and what is never divided by."""

import dataclasses
import math

import pytest

from engine.contracts.cancellation import AbortController, AbortReason
from engine.contracts.results import FinishReason, GenerateStats, SampledToken, tokens_per_second
from engine.generation.row import Row
from engine.generation.text import PushedText
from tests.engine.sampling.resolved import options

END, STOP = 9, 8
PROMPT = (1, 2, 3, 4, 5, 6)


class Text:
    """A text in which the token STOP completes a stop sequence."""

    matched_stop = None

    def push(self, token):
        return PushedText(token_bytes=b"", text="", matched_stop="stop" if token == STOP else None)

    def finish(self):
        return ""


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def after(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def controller():
    return AbortController()


@pytest.fixture
def row(clock, controller):
    return Row(
        prompt=PROMPT,
        options=options(max_tokens=4, eos_token_ids=(END,), prefill_chunk_size=2),
        signal=controller.signal,
        text=Text(),
        tail_split=True,
        submitted_at=clock(),
        clock=clock,
    )


def feed(row):
    row.settle(row.next_unit())


def prefill(row):
    while row.is_prefilling:
        feed(row)


def finite(stats):
    values = [getattr(stats, one.name) for one in dataclasses.fields(GenerateStats) if one.type == "float"]
    return len(values) == 6 and all(math.isfinite(value) and value >= 0 for value in values)


def test_an_ordinary_run_is_accounted_for_to_the_millisecond(row, clock):
    clock.after(0.25)
    row.admit([])
    clock.after(0.5)
    prefill(row)
    row.commit(SampledToken(3))
    for token in (4, 5):
        clock.after(0.1)
        feed(row)
        row.commit(SampledToken(token))
    clock.after(0.1)
    feed(row)
    _, _, end = row.commit(SampledToken(6))
    stats = end.stats
    assert end.finish_reason is FinishReason.LENGTH
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (6, 0, 4)
    assert stats.queue_ms == pytest.approx(250)
    assert stats.prefill_ms == pytest.approx(500)
    assert stats.time_to_first_token_ms == pytest.approx(750)
    assert stats.decode_ms == pytest.approx(300)
    assert stats.prefill_tps == pytest.approx(6 / 0.5)
    assert stats.decode_tps == pytest.approx(4 / 0.3)
    assert stats.cache_tokens == (*PROMPT, 3, 4, 5)


def test_an_instant_run_has_no_rates(row):
    row.admit([])
    prefill(row)
    for token in (3, 4, 5, 6):
        _, _, end = row.commit(SampledToken(token))
    assert end.stats.generated_tokens == 4
    assert (end.stats.prefill_tps, end.stats.decode_tps) == (0, 0)
    assert finite(end.stats)


def test_a_row_that_ended_in_the_queue_has_waited_and_nothing_else(row, clock, controller):
    clock.after(2)
    controller.abort(AbortReason.REQUESTED)
    _, end = row.aborted()
    assert end.stats == GenerateStats(prompt_tokens=6, queue_ms=2000)


def test_a_row_that_ended_while_its_prompt_was_read_tells_how_fast_that_went(row, clock, controller):
    row.admit([])
    clock.after(0.5)
    feed(row)
    controller.abort(AbortReason.DEADLINE)
    _, end = row.aborted()
    assert end.finish_reason is FinishReason.DEADLINE
    assert (end.stats.prefill_ms, end.stats.prefill_tps) == (500, 4)
    assert (end.stats.time_to_first_token_ms, end.stats.decode_ms, end.stats.decode_tps) == (0, 0, 0)
    assert end.stats.cache_tokens == PROMPT[:2]


def test_one_token_is_not_decoding(row, clock):
    row.admit([])
    clock.after(0.5)
    prefill(row)
    _, _, end = row.commit(SampledToken(STOP))
    clock.after(1)
    assert end.matched_stop == "stop"
    assert (end.stats.generated_tokens, end.stats.decode_ms, end.stats.decode_tps) == (1, 0, 0)


def test_time_after_the_last_token_is_not_decoding(row, clock, controller):
    row.admit([])
    prefill(row)
    row.commit(SampledToken(3))
    clock.after(0.5)
    feed(row)
    row.commit(SampledToken(4))
    clock.after(7)
    controller.abort(AbortReason.DISCONNECTED)
    _, end = row.aborted()
    assert (end.stats.decode_ms, end.stats.decode_tps) == (500, 4)


def test_a_terminating_end_token_is_counted_and_never_shown(row, clock):
    row.admit([])
    prefill(row)
    row.commit(SampledToken(3))
    clock.after(0.25)
    feed(row)
    shown, _, end = row.commit(SampledToken(END))
    assert shown is None
    assert end.finish_reason is FinishReason.STOP
    assert (end.stats.generated_tokens, end.stats.decode_tps) == (2, 8)
    assert end.stats.cache_tokens == (*PROMPT, 3)


def test_an_end_token_whose_state_a_step_ahead_has_written_is_among_the_cached_ones(row):
    row.admit([])
    prefill(row)
    row.commit(SampledToken(3))
    feed(row)
    feed(row)
    _, _, end = row.commit(SampledToken(END))
    assert end.stats.cache_tokens == (*PROMPT, 3, END)


def test_an_end_token_on_the_last_allowed_place_is_a_stop(row):
    row.admit([])
    prefill(row)
    for token in (3, 4, 5):
        row.commit(SampledToken(token))
    assert row.commit(SampledToken(END))[2].finish_reason is FinishReason.STOP


def test_cached_tokens_are_neither_computed_nor_timed(row, clock):
    row.admit([], cached_tokens=4)
    clock.after(0.5)
    prefill(row)
    row.commit(SampledToken(3))
    assert (row.stats().cached_tokens, row.stats().prefill_tps) == (4, 4)


def test_a_restart_does_not_change_what_was_read_before_the_first_token(row, clock):
    row.admit([])
    clock.after(0.5)
    prefill(row)
    row.commit(SampledToken(3))
    row.restart([])
    assert row.stats().prefill_tps == 12


@pytest.mark.parametrize(("tokens", "milliseconds", "rate"), [(5, 0, 0), (5, 0.0, 0), (0, 100, 0), (5, 100, 50)])
def test_a_rate_without_time_is_zero(tokens, milliseconds, rate):
    assert tokens_per_second(tokens, milliseconds) == rate
