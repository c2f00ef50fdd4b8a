"""Durable generations that nobody reads, and what another server makes of what was left: grace, disk, damage, ends."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import admin_pb2, generation_pb2
from service.durable import generations, log_file
from service.limits import RequestLimits
from service.offer import Offer
from tests.service.durable.fake_store import FakeStore
from tests.service.durable.lives import (
    EVERYTHING,
    WORDS,
    Life,
    Words,
    assert_grammar,
    engine_of,
    left_after,
    some,
    text_of,
    words_of,
)
from tests.service.harness import read_all, reason_of, serve


async def test_a_generation_that_nobody_reads_gives_its_row_up_after_the_grace_period(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words), grace_seconds=0.1) as serving:
        life = Life(serving, words)
        generation_id, before = await left_after(life, 5)
        await life.until(lambda: not store.held)
        assert life.generations[0].abort_reason is AbortReason.DISCONNECTED
        words.allow()
        rest, error = await read_all(life.resume(generation_id, before[-1].sequence))
        assert error is None
        assert rest[0].started.resumed_tokens == 5
        assert words_of([*before, *rest]) == list(range(len(WORDS)))
        assert life.generations[1].known == (10, 11, 12, 13, 14)


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_end_that_nobody_has_had_waits_for_the_identical_request(store: FakeStore, restarted: bool) -> None:
    words = Words()
    async with serve(engine_of(store, words), grace_seconds=0.5) as serving:
        life = Life(serving, words)
        generation_id, _ = await left_after(life, 5)
        words.allow()
        await life.until(lambda: not serving.engine.live)
        if not restarted:
            responses, error = await read_all(life.ask())
        else:
            await life.until(lambda: not store.held)
    if restarted:
        async with serve(engine_of(store, words)) as serving:
            responses, error = await read_all(Life(serving, words).ask())
            assert serving.engine.generations == []
    assert error is None
    assert_grammar(responses)
    assert responses[0].started.generation_id == generation_id
    assert text_of(responses) == EVERYTHING


async def test_a_finished_generation_is_removed_after_the_grace_period_and_then_gone(store: FakeStore) -> None:
    words = Words()
    words.allow()
    async with serve(engine_of(store, words), grace_seconds=0.1) as serving:
        life = Life(serving, words)
        responses, _ = await read_all(life.ask())
        await life.until(lambda: store.marks)
        assert not list(store.root.iterdir())
        _, error = await read_all(life.resume(responses[0].started.generation_id))
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "RESUME_POINT_GONE")


async def test_what_was_delivered_has_its_grace_period_on_disk_too_and_anew_for_whoever_reads_it_again(
    store: FakeStore,
) -> None:
    words = Words()
    words.allow()
    async with serve(engine_of(store, words), grace_seconds=7) as serving:
        responses, _ = await read_all(Life(serving, words).ask())
        generation_id = responses[0].started.generation_id
        await Life(serving, words).until(lambda: store.delivered == {generation_id: 7})
    store.delivered[generation_id] = 0.0
    async with serve(engine_of(store, words), grace_seconds=8) as serving:
        life = Life(serving, words)
        again, error = await read_all(life.resume(generation_id, responses[-2].sequence))
        assert error is None
        assert again[-1].finished == responses[-1].finished
        await life.until(lambda: store.delivered == {generation_id: 8})
        fresh, _ = await read_all(life.ask())
        assert fresh[0].started.generation_id != generation_id
    assert not store.held


async def test_what_a_draining_server_sends_to_its_end_has_its_grace_period_on_disk_alone(
    life: Life, store: FakeStore
) -> None:
    life.words.allow(4)
    call = life.ask()
    begun = await some(call, 4)
    life.serving.live.drain()
    life.serving.durable.drain()
    life.words.allow()
    _, error = await read_all(call)
    assert error is None
    await life.until(lambda: not store.held)
    assert store.delivered == {begun[0].started.generation_id: 60.0}


async def test_an_end_that_nobody_has_had_is_not_delivered(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words), grace_seconds=0.1) as serving:
        life = Life(serving, words)
        await left_after(life, 5)
        words.allow()
        await life.until(lambda: not store.held)
    assert store.delivered == {}
    assert len(list(store.root.iterdir())) == 1


async def test_an_answer_that_is_too_large_for_one_message_is_still_there_to_be_streamed(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.limits.MAX_MESSAGE_BYTES", 256)
    words = Words()
    words.allow()
    async with serve(engine_of(store, words), Offer(limits=RequestLimits(max_message_bytes=256))) as serving:
        request = generation_pb2.CompleteRequest(text={"text": "hi"}, delivery={"durable": True})
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await serving.generation.Complete(request)
        assert reason_of(failure.value) == "MESSAGE_TOO_LARGE"
        (generation,) = serving.durable.here
        assert generation.is_awaited
        responses, error = await read_all(Life(serving, words).ask())
        assert error is None
        assert responses[0].started.generation_id == generation.generation_id
        assert text_of(responses) == EVERYTHING


async def test_another_server_goes_on_with_what_the_first_has_left(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, before = await left_after(Life(serving, words), 5, request_id="mine", options={"seed": 7})
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow()
        rest, error = await read_all(life.resume(generation_id, before[-1].sequence))
        assert error is None
        assert_grammar(rest, before[-1].sequence)
        assert words_of([*before, *rest]) == list(range(len(WORDS)))
        assert text_of([*before, *rest]) == EVERYTHING
        (seen,) = life.generations
        assert (seen.generation_id, seen.request_id) == (generation_id, "mine")
        assert seen.request.options.seed == 7


async def test_the_identical_request_goes_on_in_another_server_too(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, _ = await left_after(Life(serving, words), 5)
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow()
        responses, error = await read_all(life.ask())
        assert error is None
        assert responses[0].started.generation_id == generation_id
        assert responses[0].started.resumed_tokens == 5
        assert text_of(responses) == EVERYTHING
        again, _ = await read_all(life.ask())
        assert again[0].started.generation_id != generation_id  # that one had come to its end


async def test_a_finished_generation_is_told_again_by_another_server(store: FakeStore) -> None:
    words = Words()
    words.allow()
    async with serve(engine_of(store, words)) as serving:
        responses, _ = await read_all(Life(serving, words).ask())
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        known = responses[:2]  # however much of the text was merged, there are so many
        again, error = await read_all(life.resume(responses[0].started.generation_id, known[-1].sequence))
        assert error is None
        assert_grammar(again, known[-1].sequence)
        assert text_of([*known, *again]) == EVERYTHING
        assert again[-1].finished == responses[-1].finished
        assert life.generations == []


async def test_what_was_made_with_another_model_is_refused_with_the_names(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, _ = await left_after(Life(serving, words), 5)
    engine = engine_of(store, words)
    engine.identity = type(engine.identity)(
        model="tiny", weights="other", tokenizer="t", kv_storage="affine4", adapters="", arithmetic="a"
    )
    async with serve(engine) as serving:
        _, error = await read_all(Life(serving, words).resume(generation_id))
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_MISMATCH")
        assert "weights, kv_storage" in str(error.details())
    assert not store.held


async def test_a_model_that_comes_while_a_generation_is_looked_for_is_refused_by_name_too(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, before = await left_after(Life(serving, words), 5)
    engine = engine_of(store, words)
    mine = engine.identity

    async def another_tokenizer_comes() -> None:
        engine.identity = dataclasses.replace(mine, tokenizer="other")

    engine.acceptance = another_tokenizer_comes
    async with serve(engine) as serving:
        _, error = await read_all(Life(serving, words).resume(generation_id))
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_MISMATCH")
        assert str(error.details()).endswith("it was made with other tokenizer")
        engine.acceptance, engine.identity = None, mine
        words.allow()
        rest, error = await read_all(Life(serving, words).resume(generation_id, before[-1].sequence))
        assert error is None
        assert words_of([*before, *rest]) == list(range(len(WORDS)))


async def test_a_damaged_generation_hides_no_good_one_from_the_identical_request(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow(4)
        first = life.ask(request_id="good")
        good = (await some(first, 4))[0].started.generation_id
        second = life.ask(request_id="damaged")
        damaged = (await some(second, 4))[0].started.generation_id
    log = store.root / damaged / "tokens.log"
    log.write_bytes(bytes(log.stat().st_size))
    async with serve(engine_of(store, words)) as serving:
        words.allow()
        responses, error = await read_all(Life(serving, words).ask())
        assert error is None
        assert (responses[0].started.generation_id, responses[0].started.resumed_tokens) == (good, 4)
    assert damaged not in store.keys


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_log_without_its_end_is_told_where_the_end_is_needed_and_goes_on_where_it_is_not(
    store: FakeStore, is_damaged: bool
) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, before = await left_after(Life(serving, words), 5)
    log = store.root / generation_id / "tokens.log"
    content = log.read_bytes()
    log.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if is_damaged else b""))
    expected = ("DATA_LOSS", "CHECKPOINT_DAMAGED") if is_damaged else ("OUT_OF_RANGE", "RESUME_POINT_GONE")
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow()

        async def assert_the_end_is_lost() -> None:
            _, error = await read_all(life.resume(generation_id, before[-1].sequence))
            assert error is not None
            assert (error.code().name, reason_of(error)) == expected

        await assert_the_end_is_lost()
        await assert_the_end_is_lost()
        rest, error = await read_all(life.resume(generation_id, before[-2].sequence))
        assert error is None
        assert words_of([*before[:-1], *rest]) == list(range(len(WORDS)))
        await assert_the_end_is_lost()  # whatever was sent under its number meanwhile


async def test_a_folder_under_the_name_of_another_request_is_passed_over(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        await left_after(Life(serving, words), 5)
        (mine,) = store.keys.values()
    async with serve(engine_of(store, words)) as serving:
        other, _ = await left_after(Life(serving, words), 3, options={"max_tokens": 9})
    store.keys = {other: mine}
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow()
        responses, error = await read_all(life.ask())
        assert error is None
        assert responses[0].started.generation_id != other
        assert [generation.known for generation in life.generations] == [()]
    assert other in store.keys
    assert not store.held


async def test_a_generation_without_a_log_does_not_pass_for_a_durable_one(
    life: Life, store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_file.os, "write", refuse)
    life.words.allow()
    for _ in range(2):
        responses, error = await read_all(life.ask())
        assert error is None
        assert text_of(responses) == EVERYTHING
    assert life.serving.engine.folders == [None, None]
    assert not list(store.root.iterdir())
    assert len([record for record in caplog.records if "logs of generations cannot be made" in record.message]) == 1


async def test_ended_generations_hold_no_log_open_and_the_oldest_are_left_to_the_disk(
    life: Life, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_ENDED", 2)
    life.words.allow()
    before = open_logs()
    ids = []
    for place in range(5):
        responses, _ = await read_all(life.ask(request_id=f"r{place}"))
        ids.append(responses[0].started.generation_id)
    await life.until(lambda: open_logs() == before)
    assert {one.generation_id for one in life.serving.durable.here} == set(ids[2:])
    assert store.held == set(ids[2:])
    for generation_id in (ids[-1], ids[0]):  # both within their grace period
        again, error = await read_all(life.resume(generation_id, 2))
        assert error is None
        assert_grammar(again, 2)


def open_logs() -> int:
    """Descriptors of token logs that this process holds."""
    return sum(one.resolve().name == "tokens.log" for one in Path("/proc/self/fd").iterdir())


async def test_without_a_disk_it_survives_a_lost_connection_all_the_same(life: Life, store: FakeStore) -> None:
    store.takes = False
    generation_id, before = await left_after(life, 4)
    life.words.allow()
    rest, error = await read_all(life.resume(generation_id, before[-1].sequence))
    assert error is None
    assert words_of([*before, *rest]) == list(range(len(WORDS)))


async def test_a_draining_server_gives_up_what_nobody_reads_and_takes_nobody_back(life: Life, store: FakeStore) -> None:
    generation_id, _ = await left_after(life, 4)
    life.serving.live.drain()
    life.serving.durable.drain()
    await asyncio.wait_for(life.serving.live.wait_idle(), 60)
    await life.until(lambda: not store.held)
    _, error = await read_all(life.resume(generation_id))
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_draining_server_lets_go_of_ends_that_nobody_has_had(life: Life, store: FakeStore) -> None:
    generation_id, before = await left_after(life, 4)
    life.words.allow()
    await life.until(lambda: not life.serving.engine.live)
    assert store.held
    answer = await life.serving.admin.Drain(admin_pb2.DrainRequest())
    assert (answer.finished_generations, answer.aborted_generations) == (0, 0)
    assert not store.held
    async with serve(engine_of(store, Words())) as another:
        rest, error = await read_all(Life(another, Words()).resume(generation_id, before[-1].sequence))
        assert error is None
        assert words_of([*before, *rest]) == list(range(len(WORDS)))


async def test_draining_answers_when_what_nobody_reads_is_free_for_another_server(life: Life, store: FakeStore) -> None:
    generation_id, before = await left_after(life, 4)
    answer = await life.serving.admin.Drain(admin_pb2.DrainRequest())
    assert (answer.finished_generations, answer.aborted_generations) == (0, 1)
    assert not store.held
    words = Words()
    words.allow()
    async with serve(engine_of(store, words)) as another:
        rest, error = await read_all(Life(another, words).resume(generation_id, before[-1].sequence))
        assert error is None
        assert text_of([*before, *rest]) == EVERYTHING


async def test_an_end_that_was_sent_while_the_server_drained_is_kept_for_those_whom_it_missed(
    life: Life, store: FakeStore
) -> None:
    life.words.allow(4)
    call = life.ask()
    before = await some(call, 4)
    draining = asyncio.ensure_future(life.serving.admin.Drain(admin_pb2.DrainRequest()))
    await life.until(lambda: life.serving.live.is_draining)
    life.words.allow()
    rest, error = await read_all(call)
    assert error is None
    assert (await draining).finished_generations == 1
    await life.until(lambda: not store.held)
    async with serve(engine_of(store, Words())) as another:
        again, error = await read_all(Life(another, Words()).resume(before[0].started.generation_id, 2))
        assert error is None
        assert again[-1].finished == rest[-1].finished


@pytest.mark.parametrize("asked_by", ["signal", "operator"])
async def test_a_draining_server_waits_for_no_row_whose_reader_has_left(
    life: Life, store: FakeStore, asked_by: str
) -> None:
    life.words.allow(4)
    first, second = life.ask(request_id="one"), life.ask(request_id="two")
    for call in (first, second):
        await some(call, 4)
    second.cancel()
    await life.until(lambda: life.serving.durable.detached_ids)
    if asked_by == "operator":
        draining = asyncio.ensure_future(life.serving.admin.Drain(admin_pb2.DrainRequest()))
        await life.until(lambda: life.serving.live.count == 1)  # that which nobody reads is given up at once
    else:
        life.serving.live.drain()
        life.serving.durable.drain()
        draining = asyncio.ensure_future(life.serving.live.wait_idle())
    await life.until(lambda: len(life.serving.engine.live) == 1)
    assert not draining.done()
    first.cancel()
    answer = await asyncio.wait_for(draining, 60)
    if answer is not None:
        assert (answer.finished_generations, answer.aborted_generations) == (0, 2)
    assert [one.abort_reason for one in life.generations] == [AbortReason.SHUTDOWN] * 2
    await life.until(lambda: not store.held)
    assert len(list(store.root.iterdir())) == 2  # for another process to go on with


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_call_on_its_way_in_when_draining_begins_neither_begins_nor_goes_on(
    store: FakeStore, is_left: bool
) -> None:
    words, tokenizing, tokenized = Words(), asyncio.Event(), asyncio.Event()

    async def tokenize() -> None:
        tokenizing.set()
        await tokenized.wait()

    if is_left:
        async with serve(engine_of(store, words)) as serving:
            await left_after(Life(serving, words), 4)
    async with serve(engine_of(store, words)) as serving:
        serving.engine.acceptance = tokenize
        late = asyncio.ensure_future(read_all(Life(serving, words).ask()))
        await tokenizing.wait()
        serving.live.drain()
        words.allow()
        tokenized.set()
        _, error = await late
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert serving.engine.generations == []
        assert not store.held


async def test_a_server_that_ends_tells_the_only_reader_so_and_not_that_another_has_come(store: FakeStore) -> None:
    """A client goes on after UNAVAILABLE; what another call has taken over it must leave alone."""
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        call = life.ask()
        words.allow(3)
        await some(call, 3)
        serving.durable.close()
        _, error = await asyncio.wait_for(read_all(call), 60)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
