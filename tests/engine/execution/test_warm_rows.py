"""A warm row's logits equal a cold row's: the same bits in exact rows, within rounding otherwise."""

import mlx.core as mx
import pytest

from engine.contracts.cancellation import AbortReason
from engine.generation.row import RowFault
from engine.state.prefix_disk import PrefixDisk
from tests.engine.execution.state_kinds import KINDS, ROUNDING, rows_of, text, write_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory)


@pytest.fixture(params=KINDS)
def rows(request, folders):
    return rows_of(folders, KINDS[request.param])


def check(rows, prompt, *, shared, boundary=0):
    """The next row of `prompt` equals a cold one, and is as warm as its kind of state allows.

    `shared` tokens are held by a row that ended, and `boundary` tokens by the state at the end of its prompt.
    """
    cold, none = rows.answer(prompt, warm=False)
    assert none == 0
    warm, cached = rows.answer(prompt)
    assert cached >= rows.reusable(shared, boundary, len(prompt))
    assert_same(rows, warm, cold)
    return cached


def assert_same(rows, warm, cold):
    assert warm.shape == cold.shape
    if rows.use.is_exact:
        assert mx.array_equal(warm, cold).item()
    else:
        assert mx.abs(warm - cold).max().item() < rows.kind.rounding
    if rows.kind.rounding == ROUNDING:
        assert mx.array_equal(warm.argmax(axis=-1), cold.argmax(axis=-1)).item()


def test_exact_rows_begin_at_cuts_alone(folders):
    rows = rows_of(folders, KINDS["exact"])
    rows.answer(text(1, 300))
    assert check(rows, text(1, 300), shared=288) == 288
    assert check(rows, text(1, 300) + text(2, 50), shared=288) == 288
    assert check(rows, text(1, 200) + text(3, 50), shared=192) == 192


@pytest.mark.parametrize("kind", ["affine", "turbo", "exact affine"])
def test_rows_that_are_quantized_after_their_first_chunk_begin_with_a_whole_one(folders, kind):
    """A shorter prompt attends to fewer tokens as they are than a longer one that goes on from it."""
    rows = rows_of(folders, KINDS[kind])
    rows.answer(text(1, 20), max_tokens=30)
    assert len(rows.store) == 0
    rows.answer(text(1, 200))
    assert check(rows, text(1, 30), shared=0) == 0
    assert check(rows, text(1, 31) + text(2, 40), shared=0) == 0
    assert check(rows, text(1, 70) + text(3, 40), shared=70) >= 64


@pytest.mark.parametrize("length", [40, 300, 500])
def test_a_repeated_prompt(rows, length):
    rows.answer(text(1, length))
    check(rows, text(1, length), shared=length - 1, boundary=length - 1)


@pytest.mark.parametrize(("shared", "more"), [(300, 40), (300, 1), (300, 200), (100, 200)])
def test_a_prompt_that_goes_on(rows, shared, more):
    rows.answer(text(1, shared))
    check(rows, text(1, shared) + text(2, more), shared=shared, boundary=shared - 1)


@pytest.mark.parametrize("shared", [10, 17, 40, 256, 257, 299])
def test_a_prompt_that_turns_off_is_cut_back_or_read_again(rows, shared):
    """Field report 44: reuse scrambles a wrapped ring, with wrong text and no error."""
    rows.answer(text(1, 300))
    check(rows, text(1, shared) + text(2, 50), shared=shared if shared >= 16 else 0)


def test_rows_that_join_beside_others_and_stay_when_those_leave(rows):
    prompts = [text(1, 200) + text(seed, 9 * seed) for seed in range(2, 7)]
    cold = [rows.answer(prompt, warm=False, max_tokens=4 * place + 2)[0] for place, prompt in enumerate(prompts)]
    rows.answer(text(1, 200))
    jobs = []
    for place, prompt in enumerate(prompts):
        jobs.append(rows.submit(prompt, max_tokens=4 * place + 2)[0])
        rows.rounds(1)
    rows.finish()
    for job, wanted in zip(jobs, cold, strict=True):
        assert job.row.cached_tokens >= rows.reusable(200, 0, 200)
        assert_same(rows, rows.logits(job), wanted)


def test_a_prompt_that_others_share_while_its_row_goes_on(rows):
    job, _ = rows.submit(text(1, 300), max_tokens=40)
    while not job.row.next_index:
        rows.rounds(1)
    other, _ = rows.submit(text(1, 300) + text(2, 20))
    rows.finish()
    assert other.row.cached_tokens >= rows.reusable(299, 299, 320)
    assert_same(rows, rows.logits(other), rows.answer(text(1, 300) + text(2, 20), warm=False)[0])
    assert_same(rows, rows.logits(job), rows.answer(text(1, 300), warm=False, max_tokens=40)[0])


def read_tokens(rows):
    """Prompt tokens that were computed."""
    return sum(job.row.prompt_tokens - job.row.cached_tokens for job in rows.jobs)


def test_a_burst_of_prompts_that_begin_alike_reads_the_beginning_once(rows):
    """Field report 46: two requests with one prefix at once."""
    prompts = [text(1, 400) + text(seed, 5 * seed) for seed in range(2, 6)]
    cold = [rows.answer(prompt, warm=False)[0] for prompt in prompts]
    rows.jobs.clear()
    jobs = [rows.submit(prompt)[0] for prompt in prompts]
    rows.rounds(1)
    one_reads_for_all = rows.kind.cuts or rows.use.is_exact  # whose cut at 384 ends within the beginning
    assert len(rows.batch._jobs.running) == (1 if one_reads_for_all else 4)
    rows.finish()
    for job, wanted in zip(jobs, cold, strict=True):
        assert_same(rows, rows.logits(job), wanted)
    if one_reads_for_all:
        assert read_tokens(rows) <= 400 + 14 * 5 + 3 * rows.use.cut_tokens
    assert [job.row.cached_tokens > 0 for job in jobs] == [False, *[one_reads_for_all] * 3]


def test_who_waits_for_a_prompt_goes_on_when_that_is_given_up(rows):
    _, controller = rows.submit(text(1, 400) + text(2, 10))
    follower, _ = rows.submit(text(1, 400) + text(3, 10))
    rows.rounds(2)
    waited = len(rows.batch._jobs.waiting) == 1
    assert waited == (rows.kind.cuts or rows.use.is_exact)
    controller.abort(AbortReason.REQUESTED)
    rows.finish()
    assert len(rows.ends()) == 2
    assert (follower.row.cached_tokens > 0) == waited, "what was read is not lost"
    wanted, _ = rows.answer(text(1, 400) + text(3, 10), warm=False)
    assert_same(rows, rows.logits(follower), wanted)


def test_nobody_waits_for_a_prompt_that_saves_little_or_belongs_to_others(rows):
    rows.submit(text(1, 900))
    rows.submit(text(1, 257) + text(3, 10))
    rows.submit(text(1, 200) + text(4, 300))
    rows.submit(text(1, 900), warm=False)
    rows.rounds(1)
    assert len(rows.batch._jobs.running) == 4
    rows.finish()


@pytest.mark.parametrize("rounds", [1, 3, 4, 5, 6, 7, 8, 20])
def test_after_a_cancellation_at_any_step(rows, rounds):
    """Field report 48: the state of a cancelled row is kept under one token too few, and the next row is off."""
    job = rows.cancel_after(text(1, 130), rounds, max_tokens=30)
    for entry in rows.store:
        assert {snapshot.tokens for snapshot in entry.snapshots} == {len(entry.key) // 4}
    written = len(job.row.state_tokens)
    assert written == job.row.position
    assert rows.ends()[0].stats.cache_tokens == job.row.state_tokens
    longer = [*text(1, 130), *job.row.state_tokens[130:], *text(2, 30)]
    whole_state_was_kept = rows.kind.cuts and not rows.use.is_exact
    check(rows, longer, shared=written if whole_state_was_kept else 0)


@pytest.mark.parametrize("shared", [257, 500])
def test_after_a_round_trip_over_the_disk(rows, tmp_path, shared):
    rows.keeper._disk = PrefixDisk(tmp_path / "kept", identity="", capacity_bytes=10**9)
    rows.answer(text(1, 500))
    rows.keeper.close()
    assert len(rows.store) == 0
    rows.keeper._disk = PrefixDisk(tmp_path / "kept", identity="", capacity_bytes=10**9)
    assert rows.keeper._disk.wait_idle(60)
    check(rows, text(1, shared) + text(2, 50), shared=shared, boundary=499 if shared == 500 else 0)
    rows.keeper.close()


def test_everybody_is_told_before_a_state_is_taken(rows, monkeypatch):
    """Taking a state waits for the step in hand, which no stream must feel."""
    told_at, taken = [], rows.keeper._taken

    def watched(*given):
        told_at.append(len(rows.told))
        return taken(*given)

    monkeypatch.setattr(rows.keeper, "_taken", watched)
    job, _ = rows.submit(text(1, 300))
    rows.finish()
    assert len(rows.ends()) == 1
    assert len(told_at) == (1 if rows.use.is_exact else 2)
    assert told_at[-1] == len(rows.told) or rows.use.is_exact
    assert job.row.caches == []


def test_rows_that_fail_leave_nothing(rows, monkeypatch):
    rows.answer(text(5, 40))
    held = list(rows.store)
    real = rows.stepper.dispatch

    class Broken:
        def __init__(self, pending):
            self.pending = pending

        def __getattr__(self, name):
            return getattr(self.pending, name)

        def read(self):
            return [None if token is None else RowFault("its logits are not finite") for token in self.pending.read()]

    monkeypatch.setattr(rows.stepper, "dispatch", lambda *given: Broken(real(*given)))
    rows.submit(text(1, 300))
    rows.finish()
    assert rows.ends()[-1].error is not None
    assert list(rows.store) == held
    assert rows.keeper._unconfirmed == {}


def test_after_a_failed_step_rows_are_rebuilt_and_what_was_taken_before_is_forgotten(rows, monkeypatch):
    cold, _ = rows.answer(text(1, 300), warm=False)
    job, _ = rows.submit(text(1, 300))
    while job.row.position < 300:
        rows.rounds(1)
    real, failures = rows.stepper.dispatch, [True]

    def failing(*given):
        if failures:
            failures.pop()
            raise RuntimeError("the device hiccuped")
        return real(*given)

    monkeypatch.setattr(rows.stepper, "dispatch", failing)
    rows.finish()
    assert rows.keeper._unconfirmed == {}
    assert_same(rows, rows.logits(job)[-5:], cold[-5:])
    for entry in rows.store:
        assert {snapshot.tokens for snapshot in entry.snapshots} == {len(entry.key) // 4}
    check(rows, text(1, 300) + text(2, 20), shared=0)


def test_a_state_that_cannot_be_used_is_dropped_and_the_prompt_read_from_its_start(rows, monkeypatch):
    cold, _ = rows.answer(text(1, 100), warm=False)
    rows.answer(text(1, 100))

    def broken(snapshots, tokens):
        raise RuntimeError("no memory")

    monkeypatch.setattr(rows.keeper, "_restore", broken)
    again, cached = rows.answer(text(1, 100), max_tokens=6)
    assert cached == 0
    assert_same(rows, again, cold)
    assert len(rows.store) == 1


def test_a_state_that_cannot_be_taken_costs_nobody_anything(rows, monkeypatch):
    cold, _ = rows.answer(text(1, 300), warm=False)
    for name in (
        "kv_pool.PooledKvCache",
        "kv_cache.KvCache",
        "paged_cache.PagedKvCache",
        "recurrent_cache.RecurrentCache",
    ):
        monkeypatch.setattr(f"engine.state.{name}.snapshot", lambda _: 1 / 0)
    found, _ = rows.answer(text(1, 300))
    assert_same(rows, found, cold)
    assert len(rows.store) == 0
