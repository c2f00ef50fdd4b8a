"""The policy of queue and step: order, budgets, fairness, and nobody left behind. No mlx, no clock, no thread."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.execution.scheduler import Limits, Scheduler

LIMITS = Limits(max_rows=4, prefill_step_tokens=64, prefill_chunk_tokens=40, mixed_prefill_tokens=16, state_bytes=1000)


@dataclass(eq=False)
class FakeJob:
    prompt: int
    output: int = 10
    priority: int = 0
    caller: str = ""
    predicted_bytes: int = 1
    exact_chunk: int | None = None
    fed: int = 0
    emitted: int = 0
    first_token_step: int | None = field(default=None)
    context_tokens: int = 1
    unit_tokens: int = 1
    due_at: float = 0.0

    @property
    def is_prefilling(self):
        return self.fed < self.prompt

    @property
    def unfed_tokens(self):
        return self.prompt - self.fed

    def next_width(self, limit_tokens):
        return min(self.exact_chunk or min(64, limit_tokens), self.unfed_tokens) if self.is_prefilling else 1


def scheduler(**changes):
    return Scheduler(replace(LIMITS, **changes))


def run_step(policy, number=0):
    """Admit, plan, and do what the plan says; finished jobs leave."""
    policy.admit()
    plan = policy.plan()
    for job, width in plan:
        if job.is_prefilling:
            job.fed += width
            if job.is_prefilling:
                continue
            job.first_token_step = number
        job.emitted += 1
        if job.emitted >= job.output:
            policy.remove(job)
    return plan


def run_until(policy, condition, limit=2000):
    for number in range(1, limit):
        run_step(policy, number)
        if condition():
            return number
    raise AssertionError("it never came to that")


def submit(policy, *jobs):
    for job in jobs:
        policy.submit(job)
    return jobs


def decoding(policy, count, output=10**9):
    jobs = submit(policy, *(FakeJob(1, output) for _ in range(count)))
    run_until(policy, lambda: all(job.emitted for job in jobs))
    return jobs


def test_every_decoding_row_steps_beside_a_long_prompt_that_gets_its_share():
    policy = scheduler()
    rows = decoding(policy, 3)
    (long,) = submit(policy, FakeJob(1000))
    before = [row.emitted for row in rows]
    plan = run_step(policy)
    assert [row.emitted for row in rows] == [count + 1 for count in before]
    assert plan[-1] == (long, 16)


@pytest.mark.parametrize(("prompts", "spent"), [(1, 16), (2, 32), (4, 64), (6, 64)])
def test_long_prompts_beside_decoding_rows_bring_a_share_each(prompts, spent):
    policy = scheduler(max_rows=8)
    decoding(policy, 1)
    submit(policy, *(FakeJob(1000) for _ in range(prompts)))
    policy.admit()
    assert sum(width for _, width in policy.plan()[1:]) == spent


def test_a_prompt_that_others_wait_behind_is_finished_at_once():
    policy = scheduler(max_rows=8)
    decoding(policy, 1)
    (short,) = submit(policy, FakeJob(40))
    submit(policy, FakeJob(1000))
    run_step(policy)
    assert short.emitted == 1
    (single,) = submit(policy, FakeJob(41))
    assert [(job, width) for job, width in run_step(policy) if job is single] == [(single, 32)]


def test_of_a_burst_as_many_prompts_are_read_as_a_step_finishes_and_no_other_is_begun():
    policy = scheduler(max_rows=8)
    decoding(policy, 1)
    burst = submit(policy, *(FakeJob(30) for _ in range(3)))
    assert [(job, width) for job, width in run_step(policy)[1:]] == [(burst[0], 30), (burst[1], 30)]
    assert [job.emitted for job in burst] == [1, 1, 0]


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (4, 16), (6, 24), (30, 64)])
def test_a_prompt_s_share_grows_with_the_rows_that_decode(rows, width):
    policy = scheduler(max_rows=40, mixed_row_tokens=4)
    decoding(policy, rows)
    submit(policy, FakeJob(1000))
    assert run_step(policy)[-1][1] == width


def test_a_short_prompt_alone_beside_decoding_rows_takes_its_share():
    policy = scheduler()
    decoding(policy, 1)
    submit(policy, FakeJob(40))
    assert run_step(policy)[-1][1] == 16


def test_a_prompt_alone_takes_the_whole_budget_of_a_step():
    policy = scheduler()
    submit(policy, FakeJob(1000))
    assert [width for _, width in run_step(policy)] == [64]


def test_an_exact_chunk_wider_than_the_budget_still_moves_whole():
    policy = scheduler()
    decoding(policy, 2)
    submit(policy, FakeJob(600, exact_chunk=500))
    assert run_step(policy)[-1][1] == 500


def test_prompts_of_one_length_keep_their_order():
    policy = scheduler()
    jobs = submit(policy, *(FakeJob(100) for _ in range(4)))
    run_until(policy, lambda: all(job.first_token_step for job in jobs))
    steps = [job.first_token_step for job in jobs]
    assert steps == sorted(steps)


def test_a_short_prompt_behind_a_long_one_starts_within_two_steps():
    policy = scheduler()
    decoding(policy, 1)
    submit(policy, FakeJob(5000))
    run_step(policy)
    (short,) = submit(policy, FakeJob(5))
    assert run_until(policy, lambda: short.first_token_step is not None) <= 2


def test_a_long_prompt_finishes_under_a_stream_of_short_ones():
    policy = scheduler(max_rows=3)
    (long,) = submit(policy, FakeJob(640, output=1))
    served = 0
    for number in range(1, 400):
        submit(policy, FakeJob(16, output=1))
        run_step(policy, number)
        served = number
        if long.first_token_step is not None:
            break
    assert long.first_token_step is not None
    assert served <= 2 * 640 / 16


def test_higher_priority_leaves_the_queue_and_is_prefilled_first():
    policy = scheduler(max_rows=2)
    low, other, high = submit(policy, FakeJob(200), FakeJob(200), FakeJob(200, priority=5))
    assert policy.admit() == [high, low]
    assert [job for job, _ in policy.plan()] == [high]
    assert policy.waiting == [other]


def test_a_caller_with_many_requests_does_not_keep_another_waiting():
    policy = scheduler(max_rows=2)
    crowd = submit(policy, *(FakeJob(10, caller="crowd") for _ in range(10)))
    (single,) = submit(policy, FakeJob(10, caller="single"))
    assert policy.admit() == [crowd[0], single]


def test_rows_are_admitted_while_their_predicted_state_fits():
    policy = scheduler(state_bytes=100)
    first, second, third = submit(
        policy, FakeJob(5, predicted_bytes=60), FakeJob(5, predicted_bytes=60), FakeJob(5, predicted_bytes=10)
    )
    assert policy.admit() == [first]
    policy.remove(first)
    assert policy.admit() == [second, third]


def test_a_head_that_does_not_fit_is_not_overtaken_for_ever():
    policy = scheduler(state_bytes=100)
    (running,) = submit(policy, FakeJob(5, predicted_bytes=50))
    policy.admit()
    (big,) = submit(policy, FakeJob(5, predicted_bytes=90))
    small = submit(policy, *(FakeJob(5, predicted_bytes=10) for _ in range(5)))
    assert policy.admit() == []
    policy.remove(running)
    assert policy.admit() == [big, small[0]]


def test_a_row_waits_while_the_step_of_all_would_need_too_much_beside_their_states():
    def workspace_bytes(*, step_tokens, context_tokens):
        return step_tokens * context_tokens

    policy = scheduler(state_bytes=1000, workspace_bytes=workspace_bytes)
    first, long, wide = submit(
        policy,
        FakeJob(5, predicted_bytes=100, context_tokens=10, unit_tokens=5),
        FakeJob(5, predicted_bytes=100, context_tokens=60, unit_tokens=5),
        FakeJob(5, predicted_bytes=100, context_tokens=10, unit_tokens=10),
    )
    assert policy.admit() == [first, long]
    assert policy.room_bytes == 1000 - 200 - 10 * 60
    policy.remove(long)
    assert policy.admit() == [wide]
    assert policy.room_bytes == 1000 - 200 - 15 * 10
    policy.remove(first)
    policy.remove(wide)
    assert policy.room_bytes == 1000


def test_a_job_that_may_not_start_yet_is_passed_over_and_keeps_its_place():
    policy = scheduler(max_rows=2)
    first, second, third = FakeJob(prompt=5), FakeJob(prompt=5), FakeJob(prompt=5)
    submit(policy, first, second, third)
    assert policy.admit(may_start=lambda job: job is not first) == [second, third]
    assert policy.waiting == [first]
    policy.remove(second)
    assert policy.admit() == [first]


def test_a_removed_job_is_gone_from_queue_and_rows():
    policy = scheduler(max_rows=1)
    running, waiting = submit(policy, FakeJob(5), FakeJob(5))
    policy.admit()
    policy.remove(waiting)
    policy.remove(running)
    assert (len(policy), policy.running, policy.waiting) == (0, [], [])


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and departures keeps every bound and loses nobody."""

    def __init__(self):
        super().__init__()
        self.policy = scheduler()
        self.jobs = []
        self.steps = 0

    @rule(
        prompt=st.integers(1, 300),
        output=st.integers(1, 20),
        priority=st.integers(0, 2),
        caller=st.sampled_from("ab"),
        size=st.integers(1, 1000),
        chunk=st.none() | st.integers(1, 200),
    )
    def arrive(self, prompt, output, priority, caller, size, chunk):
        job = FakeJob(prompt, output, priority, caller, size, chunk)
        self.policy.submit(job)
        self.jobs.append(job)

    @rule()
    def step(self):
        self.steps += 1
        plan = run_step(self.policy, self.steps)
        widths = [width for job, width in plan if job.emitted == 0 or width > 1]
        chosen = [job for job, _ in plan]
        assert len(set(map(id, chosen))) == len(chosen)
        assert bool(plan) == bool(self.jobs and any(job in self.jobs for job in chosen))
        assert sum(widths) <= 64 or len(widths) == 1
        self.jobs = [job for job in self.jobs if job.emitted < job.output]

    @rule(data=st.data())
    def leave(self, data):
        if self.jobs:
            job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
            self.policy.remove(job)

    @invariant()
    def everybody_is_known_once(self):
        assert sorted(map(id, self.policy)) == sorted(map(id, self.jobs))

    @invariant()
    def bounds_hold(self):
        running = self.policy.running
        assert len(running) <= 4
        assert len(running) <= 1 or sum(job.predicted_bytes for job in running) <= 1000

    def teardown(self):
        for _ in range(len(self.jobs) * 700):
            if not self.jobs:
                break
            self.step()
        assert self.jobs == []


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("rows", [1, 3])
def test_with_nothing_to_do_the_plan_is_empty(rows):
    policy = scheduler(max_rows=rows)
    assert (policy.admit(), policy.plan()) == ([], [])


def test_of_equals_who_wait_the_one_whose_time_ends_first_goes_first():
    policy = scheduler(max_rows=1)
    running = FakeJob(prompt=1, output=5)
    submit(policy, running)
    policy.admit()
    later, soon, urgent = FakeJob(prompt=1, due_at=9.0), FakeJob(prompt=1, due_at=3.0), FakeJob(prompt=1, priority=1)
    same = FakeJob(prompt=1, due_at=9.0)
    for job in (later, soon, same, urgent):
        policy.submit(job)
    order = []
    while policy.waiting:
        policy.remove(policy.running[0])
        order += policy.admit()
    assert order == [urgent, soon, later, same]
