"""Faults below the service: a step that raises, hangs or kills the engine. Everybody is told; the innocent go on."""

import asyncio
import contextlib
import threading

import grpc
import pytest

from engine.execution import packed_method
from mlxstream.v1 import generation_pb2
from service import health as health_module
from service.health import follow_engine
from tests.service.harness import reason_of
from tests.waiting import until
from tests.whole.calls import nothing_is_left, outcome, request

CODE = grpc.StatusCode
POISON_TOKENS = 11  # the length of the prompt whose row no step survives


@pytest.fixture
def hook(monkeypatch):
    """Replaces what starts a step; the hook is called with its rows and the real function."""
    real = packed_method.dispatch_packed_step

    def install(before):
        def hooked(binding, rows, after):
            before(rows)
            return real(binding, rows, after)

        monkeypatch.setattr(packed_method, "dispatch_packed_step", hooked)

    return install


def poison(rows):
    """Fail each step of the one row, once it has said three tokens."""
    if any(row.prompt_tokens == POISON_TOKENS and row.next_index >= 3 for row in rows):
        raise RuntimeError("a secret of the device")


async def test_a_step_that_raises_once_costs_nobody_a_token(whole, hook):
    wanted = [(await outcome(whole.generation.Generate(request(seed, max_tokens=20))))[0] for seed in range(3)]
    faults = [None] * 9 + [RuntimeError("a passing fault")]

    def fail_once(_rows):
        if faults and (fault := faults.pop(0)) is not None:
            raise fault

    hook(fail_once)
    found = await asyncio.gather(
        *(outcome(whole.generation.Generate(request(seed, max_tokens=20))) for seed in range(3))
    )
    assert not faults
    assert [ids for ids, _, _ in found] == wanted
    assert [error for _, _, error in found] == [None] * 3


async def test_a_row_that_no_step_survives_ends_alone_with_what_it_has_said(whole, hook):
    wanted, _, _ = await outcome(whole.generation.Generate(request(1, prompt=POISON_TOKENS, max_tokens=20)))
    hook(poison)
    guilty, *others = await asyncio.gather(
        outcome(whole.generation.Generate(request(1, prompt=POISON_TOKENS, max_tokens=20))),
        *(outcome(whole.generation.Generate(request(seed, max_tokens=20))) for seed in range(3)),
    )
    ids, last, error = guilty
    assert ids == wanted[: len(ids)]
    assert 3 <= len(ids) <= 4  # a step may be under way already
    assert error.code() is CODE.INTERNAL
    assert reason_of(error) == "GENERATION_FAILED"
    assert "secret" not in error.details()
    assert last.finished.stats.generated_tokens == len(ids)
    assert [(len(ids), error) for ids, _, error in others] == [(20, None)] * 3
    await until(lambda: nothing_is_left(whole))


async def test_a_unary_call_of_such_a_row_is_told_the_same(whole, hook):
    hook(poison)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole.generation.Complete(
            request(1, prompt=POISON_TOKENS, max_tokens=20, kind=generation_pb2.CompleteRequest)
        )
    assert caught.value.code() is CODE.INTERNAL
    assert reason_of(caught.value) == "GENERATION_FAILED"


@contextlib.asynccontextmanager
async def followed(whole, *, stall_seconds):
    follower = asyncio.ensure_future(follow_engine(whole.engine, whole.health, stall_seconds=stall_seconds))
    try:
        yield
    finally:
        follower.cancel()


async def test_an_engine_that_dies_tells_everybody_and_is_not_healthy(whole, hook, monkeypatch):
    def die(rows):
        if any(row.next_index >= 3 for row in rows):
            raise SystemExit("a secret end")

    async with followed(whole, stall_seconds=60):
        await asyncio.sleep(0)
        assert whole.health.not_ready is None
        hook(die)
        found = await asyncio.gather(
            *(outcome(whole.generation.Generate(request(seed, max_tokens=20))) for seed in range(40))
        )
        assert {(error.code(), reason_of(error)) for _, _, error in found} == {(CODE.UNAVAILABLE, "ENGINE_FAILED")}
        assert not any("secret" in error.details() for _, _, error in found)
        assert 3 <= max(len(ids) for ids, _, _ in found) <= 4
        _, last, error = await outcome(whole.generation.Generate(request(1)))
        assert last is None
        assert reason_of(error) == "ENGINE_FAILED"
        await until(lambda: whole.health.not_ready is not None)


async def test_a_step_that_hangs_is_seen_by_health_and_keeps_no_caller(whole, hook, monkeypatch):
    hanging, release = threading.Event(), threading.Event()

    def hang(_rows):
        hanging.set()
        release.wait(60)

    monkeypatch.setattr(health_module, "POLL_SECONDS", 0.01)
    async with followed(whole, stall_seconds=0.2):
        hook(hang)
        leaving = whole.generation.Generate(request(1, max_tokens=5))
        staying = whole.generation.Generate(request(2, max_tokens=5))
        hurried = whole.generation.Generate(request(3, max_tokens=5), timeout=0.5)
        await asyncio.to_thread(hanging.wait, 60)
        await until(lambda: whole.health.not_ready is not None)
        leaving.cancel()
        assert await leaving.code() is CODE.CANCELLED
        assert await hurried.code() is CODE.DEADLINE_EXCEEDED
        release.set()
        ids, _, error = await outcome(staying)
        assert (len(ids), error) == (5, None)
        await until(lambda: whole.health.not_ready is None)
    await until(lambda: nothing_is_left(whole))
