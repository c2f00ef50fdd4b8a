"""Denoising rows in the engine thread's batch: turns, aborts between passes, faults of one, and nothing left behind."""

from itertools import pairwise

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import EngineFailedError, GenerationFailedError
from engine.contracts.events import CanvasRevised, GenerationFinished, GenerationStarted, TokensGenerated
from engine.contracts.results import FinishReason
from engine.execution.batch import Batch
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.denoising_method import DenoisingMethod
from engine.execution.job import Job
from engine.execution.prefixes import PrefixKeeper
from engine.execution.scheduler import Limits
from engine.execution.stepper import MethodStepper
from engine.execution.tally import StepTally
from engine.generation.bindings.denoising import bind_denoising_model
from engine.generation.scopes import WiredScope
from engine.state.prefix_store import PrefixStore
from tests.engine.generation.scripted_denoiser import CANVAS, ScriptedGraph, make_row, run

PROMPT = (9, 8, 7, 6, 5)
STARTED = object.__new__(GenerationStarted)
LIMITS = Limits(
    max_rows=4,
    prefill_step_tokens=64,
    prefill_chunk_tokens=64,
    mixed_prefill_tokens=8,
    state_bytes=10**9,
    rows_per_step=1,
)


class House:
    """A batch over a scripted graph, and what each job was told."""

    def __init__(self, **graph):
        self.graph = ScriptedGraph(**graph)
        wired = WiredScope(limit_bytes=0, set_limit=lambda limit: 0, synchronize=lambda: None)
        prefixes = PrefixKeeper(PrefixStore(0), restore=None)
        method = DenoisingMethod(bind_denoising_model(self.graph))
        self.stepper = MethodStepper(method, wired, LIMITS, prefixes, CheckpointKeeper(None))
        self.told = {}
        self.batch = Batch(self.stepper, lambda: 0.0, self.hear, StepTally())

    def hear(self, told):
        for mailbox, event in told:
            self.told[mailbox].append(event)

    def submit(self, prompt=PROMPT, **changes):
        row, controller = make_row(prompt, **changes)
        job = Job(row=row, mailbox=object(), started=STARTED)
        self.told[job.mailbox] = []
        self.batch.submit(job)
        return job, controller

    def heard(self, job):
        return self.told[job.mailbox]

    def ids(self, job):
        return [
            token.token for event in self.heard(job) if isinstance(event, TokensGenerated) for token in event.tokens
        ]

    def end(self, job):
        last = self.heard(job)[-1]
        return last if isinstance(last, GenerationFinished) else None

    def run(self, rounds=10_000):
        for _ in range(rounds):
            if not len(self.batch):
                return
            self.batch.advance()
        raise AssertionError("the batch does not come to an end")


def test_a_row_in_the_batch_says_what_it_says_alone():
    house = House()
    job, _ = house.submit(max_tokens=20)
    house.run()
    told, _ = run(ScriptedGraph(), make_row(PROMPT, max_tokens=20)[0])
    assert house.ids(job) == [
        token.token for event in told if isinstance(event, TokensGenerated) for token in event.tokens
    ]
    assert house.end(job).finish_reason is FinishReason.LENGTH


def test_rows_take_turns_pass_by_pass():
    house = House()
    steps = {"denoising": {"max_denoising_steps": 6, "threshold": 1.0}, "max_tokens": CANVAS}
    prompts = [(9,), (9, 9), (9, 9, 9)]
    for seed, prompt in enumerate(prompts):
        house.submit(prompt, seed=seed, **steps)
    house.run()
    turns = [offset for _, _, offset, _ in house.graph.passes()]
    assert turns == [1, 2, 3] * (len(turns) // 3)
    assert len(turns) == 18


def test_a_long_prompt_keeps_nobody_waiting_for_more_than_one_chunk():
    house = House()
    house.submit(max_tokens=CANVAS)
    house.submit((4,) * 40, max_tokens=1, prefill_chunk_size=4)
    house.run()
    kinds = [call[0] for call in house.graph.calls]
    own = [index for index, call in enumerate(house.graph.calls) if call[0] == "pass" and call[2] == 5]
    assert kinds.count("extend") == 9
    assert all(later - earlier <= 2 for earlier, later in pairwise(own))


def test_an_abort_lands_between_two_passes_and_frees_the_row():
    house = House()
    job, controller = house.submit(max_tokens=CANVAS, denoising={"max_denoising_steps": 48, "threshold": 1.0})
    while len(house.graph.passes()) < 3:
        house.batch.advance()
    controller.abort(AbortReason.REQUESTED)
    house.batch.advance()
    assert house.end(job).finish_reason is FinishReason.CANCELLED
    assert len(house.graph.passes()) == 3
    assert [state.closed for state in house.graph.states] == [1]
    assert len(house.batch) == 0
    house.batch.settle()


def test_an_abort_while_the_prompt_is_read_frees_the_row():
    house = House()
    job, controller = house.submit((4,) * 40, prefill_chunk_size=4)
    house.batch.advance()
    house.batch.advance()
    controller.abort(AbortReason.DEADLINE)
    house.batch.advance()
    assert house.end(job).finish_reason is FinishReason.DEADLINE
    assert [state.closed for state in house.graph.states] == [1]
    assert not house.graph.passes()


def test_a_row_with_bad_scores_ends_alone():
    house = House()
    job, _ = house.submit(max_tokens=CANVAS)
    while not house.graph.passes():
        house.batch.advance()
    house.graph.not_a_number = True
    while house.end(job) is None:
        house.batch.advance()
    house.graph.not_a_number = False
    assert isinstance(house.end(job).error, GenerationFailedError)
    after, _ = house.submit(max_tokens=CANVAS)
    house.run()
    assert house.ids(after) == house.graph.said(5, CANVAS)


@pytest.mark.parametrize("at", range(9))
def test_a_fault_of_the_device_costs_no_row_a_token(at):
    quiet, house = House(), House()
    wanted = [{"max_tokens": 2 * CANVAS, "seed": seed} for seed in (1, 2)]
    expected = [quiet.submit(**one)[0] for one in wanted]
    quiet.run()
    jobs = [house.submit(**one)[0] for one in wanted]
    while len(house.graph.calls) < at:
        house.batch.advance()
    house.graph.faults = 1
    house.run()
    assert [house.ids(job) for job in jobs] == [quiet.ids(job) for job in expected]
    assert [house.end(job).stats.denoising for job in jobs] == [quiet.end(job).stats.denoising for job in expected]
    assert all(state.closed == 1 for state in house.graph.states)


def test_a_device_that_does_not_work_any_more_ends_the_engine():
    house = House()
    house.submit()
    house.graph.faults = 2
    with pytest.raises(EngineFailedError):
        house.run()


def test_canvases_reach_the_caller_who_asked_and_nobody_else():
    house = House()
    shown, _ = house.submit(max_tokens=CANVAS, draft_blocks=True)
    silent, _ = house.submit(max_tokens=CANVAS)
    house.run()
    assert [isinstance(event, CanvasRevised) for event in house.heard(shown)].count(True) > 1
    assert not [event for event in house.heard(silent) if isinstance(event, CanvasRevised)]


def test_a_closed_stepper_has_let_go_of_the_graph():
    house = House()
    house.stepper.rest()
    house.stepper.resume()
    house.stepper.close()
    assert house.graph.closed == 1


def test_trying_a_graph_out_finds_scores_that_are_no_numbers_and_leaves_nothing_behind():
    graph = ScriptedGraph()
    method = DenoisingMethod(bind_denoising_model(graph))
    assert method.works()
    graph.not_a_number = True
    assert not method.works()
    assert [state.closed for state in graph.states] == [1, 1]
