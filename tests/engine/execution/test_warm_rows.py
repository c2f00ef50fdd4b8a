"""A warm row's logits equal a cold row's: the same bits in exact rows, within rounding otherwise."""

import mlx.core as mx
import pytest

from engine.generation.row import RowFault
from engine.state.prefix_disk import PrefixDisk
from tests.engine.execution.warm_rows import CHUNK, Rows
from tests.engine.models import tiny_llama

CONTEXT = 1024
KINDS = {
    "pooled": {},
    "alone": {"library_arithmetic": True},
    "exact": {"row_tile_tokens": 8},
}
ROUNDING = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.write(folder, scale=4.0, tie_word_embeddings=False, max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture(params=KINDS)
def rows(request, folder):
    exact = request.param == "exact"
    return Rows(tiny_llama.bind(folder, prefill_chunk_tokens=CHUNK, **KINDS[request.param]), exact=exact)


def text(seed, length):
    return tiny_llama.random_prompt(seed, CONTEXT)[:length]


def check(rows, prompt, *, at_least):
    """The next row of `prompt` is warm and equals a cold one. A cold run of its own comes first."""
    cold, none = rows.answer(prompt, warm=False)
    assert none == 0
    warm, cached = rows.answer(prompt)
    assert cached >= at_least - at_least % rows.use.cut_tokens
    assert_same(rows, warm, cold)
    return cached


def assert_same(rows, warm, cold):
    assert warm.shape == cold.shape
    if rows.use.is_exact:
        assert mx.array_equal(warm, cold).item()
    else:
        assert mx.abs(warm - cold).max().item() < ROUNDING
        assert mx.array_equal(warm.argmax(axis=-1), cold.argmax(axis=-1)).item()


def test_exact_rows_begin_at_cuts_alone(folder):
    rows = Rows(tiny_llama.bind(folder, prefill_chunk_tokens=CHUNK, row_tile_tokens=8), exact=True)
    rows.answer(text(1, 300))
    assert check(rows, text(1, 300), at_least=288) == 288
    assert check(rows, text(1, 300) + text(2, 50), at_least=288) == 288
    assert check(rows, text(1, 200) + text(3, 50), at_least=192) == 192


@pytest.mark.parametrize("length", [40, 300, 700])
def test_a_repeated_prompt(rows, length):
    rows.answer(text(1, length))
    check(rows, text(1, length), at_least=length - 1)


@pytest.mark.parametrize(("shared", "more"), [(300, 40), (300, 1), (300, 400), (100, 300)])
def test_a_prompt_that_goes_on(rows, shared, more):
    rows.answer(text(1, shared))
    check(rows, text(1, shared) + text(2, more), at_least=shared - 1)


@pytest.mark.parametrize("shared", [33, 255, 256, 257, 299])
def test_a_prompt_that_turns_off_begins_with_a_trimmed_state(rows, shared):
    rows.answer(text(1, 300))
    check(rows, text(1, shared) + text(2, 50), at_least=shared)


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
        assert job.row.cached_tokens >= 192
        assert_same(rows, rows.logits(job), wanted)


def test_a_prompt_that_others_share_while_its_row_goes_on(rows):
    job, _ = rows.submit(text(1, 300), max_tokens=40)
    while not job.row.next_index:
        rows.rounds(1)
    other, _ = rows.submit(text(1, 300) + text(2, 20))
    rows.finish()
    assert other.row.cached_tokens >= 288
    assert_same(rows, rows.logits(other), rows.answer(text(1, 300) + text(2, 20), warm=False)[0])
    assert_same(rows, rows.logits(job), rows.answer(text(1, 300), warm=False, max_tokens=40)[0])


@pytest.mark.parametrize("rounds", [*range(1, 16)])
def test_after_a_cancellation_at_any_step(rows, rounds):
    """Field report 48: the state of a cancelled row is kept under one token too few, and the next row is off."""
    job = rows.cancel_after(text(1, 130), rounds, max_tokens=30)
    for entry in rows.store:
        assert {snapshot.tokens for snapshot in entry.snapshots} == {len(entry.key) // 4}
    written = len(job.row.state_tokens)
    assert rows.ends()[0].stats.cache_tokens == job.row.state_tokens
    longer = [*text(1, 130), *job.row.state_tokens[130:], *text(2, 30)]
    least = min(written, 128 if job.row.next_index and rows.use.is_exact else 0 if rows.use.is_exact else written)
    check(rows, longer, at_least=least)


@pytest.mark.parametrize("shared", [257, 600])
def test_after_a_round_trip_over_the_disk(rows, tmp_path, shared):
    rows.keeper._disk = PrefixDisk(tmp_path / "kept", identity="", capacity_bytes=10**9)
    rows.answer(text(1, 600))
    rows.keeper.close()
    assert len(rows.store) == 0
    rows.keeper._disk = PrefixDisk(tmp_path / "kept", identity="", capacity_bytes=10**9)
    assert rows.keeper._disk.wait_idle(10)
    check(rows, text(1, shared) + text(2, 50), at_least=shared - 1)
    rows.keeper.close()


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
    monkeypatch.setattr("engine.state.kv_pool.PooledKvCache.snapshot", lambda _: 1 / 0)
    monkeypatch.setattr("engine.state.kv_cache.KvCache.snapshot", lambda _: 1 / 0)
    found, _ = rows.answer(text(1, 300))
    assert_same(rows, found, cold)
    assert len(rows.store) == 0
