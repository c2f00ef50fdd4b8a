"""Durable generations over a real loopback server: who reads them, who is told what, and what outlives whom."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import generation_pb2, result_pb2
from tests.service.durable.fake_store import FakeStore
from tests.service.durable.lives import (
    DURABLE,
    EVERYTHING,
    WORDS,
    Life,
    Response,
    assert_grammar,
    left_after,
    some,
    text_of,
    words_of,
)
from tests.service.fake_engine import FakeGeneration
from tests.service.harness import read_all, reason_of


async def test_a_durable_stream_reads_like_any_other(life: Life) -> None:
    life.words.allow()
    responses, error = await read_all(life.ask())
    assert error is None
    assert_grammar(responses)
    assert text_of(responses) == EVERYTHING
    assert responses[0].started.resumed_tokens == 0


async def test_a_lost_connection_leaves_the_row_running_and_resume_brings_the_rest(life: Life) -> None:
    generation_id, before = await left_after(life, 4)
    life.words.allow(7)
    await life.until(lambda: life.generations[0].emitted == 7)
    call = life.resume(generation_id, before[-1].sequence)
    after = await some(call, 3)
    life.words.allow()
    rest, error = await read_all(call)
    assert error is None
    assert_grammar([*after, *rest], before[-1].sequence)
    assert after[0].started.resumed_tokens == 7
    assert words_of([*before, *after, *rest]) == list(range(len(WORDS)))
    assert text_of([*before, *after, *rest]) == EVERYTHING
    assert len(life.generations) == 1


async def test_any_point_that_was_sent_can_be_resumed_from_in_any_order(life: Life) -> None:
    generation_id, before = await left_after(life, 6)
    for response in [*before, *reversed(before)]:
        call = life.resume(generation_id, response.sequence)
        known = [one for one in before if one.sequence <= response.sequence]
        again = await some(call, 6 - len(words_of(known)))
        assert words_of([*known, *again]) == list(range(6))
        assert text_of([*known, *again]) == "".join(WORDS[:6])
        after = [one for one in before if one.sequence > response.sequence]
        assert again[1:] == after[: len(again) - 1]  # the same messages under the same numbers
        call.cancel()


async def test_the_identical_request_joins_the_generation_that_nobody_reads(life: Life) -> None:
    generation_id, _ = await left_after(life, 3)
    life.words.allow()
    responses, error = await read_all(life.ask(options={}))
    assert error is None
    assert_grammar(responses)
    assert responses[0].started.generation_id == generation_id
    assert text_of(responses) == EVERYTHING


@pytest.mark.parametrize("other", [{"text": "other"}, {"options": {"max_tokens": 9}}, {"options": {"logprobs": True}}])
async def test_another_request_begins_a_generation_of_its_own(life: Life, other: dict[str, Any]) -> None:
    await left_after(life, 3)
    life.words.allow()
    if "text" in other:
        other = {"tokens": {"ids": [9]}}
        call = life.serving.generation.Generate(generation_pb2.GenerateRequest(delivery=DURABLE, **other))
    else:
        call = life.ask(**other)
    responses, _ = await read_all(call)
    assert responses[0].started.resumed_tokens == 0
    assert len(life.generations) == 2


async def test_a_twin_of_a_generation_that_is_read_is_another_one_unless_it_is_the_same_request(life: Life) -> None:
    life.words.allow(2)
    first = life.ask(request_id="one")
    begun = await some(first, 2)
    second = life.ask(request_id="two")
    assert (await some(second, 2))[0].started.generation_id != begun[0].started.generation_id
    again = life.ask(request_id="one")
    assert (await some(again, 2))[0].started.generation_id == begun[0].started.generation_id
    _, error = await read_all(first)
    assert error is not None
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.CANCELLED, "TAKEN_OVER")
    life.words.allow()
    for call in (second, again):
        rest, error = await read_all(call)
        assert error is None
        assert words_of(rest) == list(range(2, len(WORDS)))


async def test_the_same_request_sent_twice_at_once_is_one_generation(life: Life, store: FakeStore) -> None:
    life.words.allow()
    ended = await asyncio.gather(*(read_all(life.ask(request_id="one")) for _ in range(4)))
    refused = [(error.code(), reason_of(error)) for _, error in ended if error is not None]
    assert refused == [(grpc.StatusCode.CANCELLED, "TAKEN_OVER")] * 3
    (whole,) = [responses for responses, error in ended if error is None]
    assert text_of(whole) == EVERYTHING
    assert len(life.generations) == len(list(store.root.iterdir())) == 1


async def test_whoever_resumes_takes_the_stream_from_a_connection_that_hangs(life: Life) -> None:
    life.words.allow(3)
    hanging = life.ask()
    before = await some(hanging, 3)
    call = life.resume(before[0].started.generation_id, before[-1].sequence)
    assert (await call.read()).WhichOneof("event") == "started"
    life.words.allow()
    rest, error = await read_all(call)
    assert error is None
    assert words_of([*before, *rest]) == list(range(len(WORDS)))
    _, error = await read_all(hanging)
    assert error is not None
    assert reason_of(error) == "TAKEN_OVER"


async def test_every_call_that_is_taken_over_gets_its_status_be_a_message_under_way_or_not(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation_id, _ = await left_after(life, 6)
    (generation,) = life.serving.durable.here
    attached, attach = [], type(generation).attach
    monkeypatch.setattr(
        type(generation), "attach", lambda *given, **named: attached.append(1) or attach(*given, **named)
    )
    calls = [life.resume(generation_id) for _ in range(30)]
    reading = asyncio.gather(*map(read_all, calls))
    await life.until(lambda: len(attached) == 30)
    life.words.allow()
    async with asyncio.timeout(60):
        ended = await reading
    errors = [error for _, error in ended if error is not None]
    assert [(error.code(), reason_of(error)) for error in errors] == [(grpc.StatusCode.CANCELLED, "TAKEN_OVER")] * 29
    (whole,) = [responses for responses, error in ended if error is None]
    assert words_of(whole) == list(range(len(WORDS)))


async def test_the_deadline_of_a_call_that_was_taken_over_does_not_end_what_another_one_reads(life: Life) -> None:
    generation_id, _ = await left_after(life, 2)
    (generation,) = life.serving.durable.here
    lost = generation.attach(0)
    call = life.resume(generation_id)
    await some(call, 2)
    lost.abort(AbortReason.DEADLINE)
    life.words.allow()
    _, error = await read_all(call)
    assert error is None


async def test_the_last_messages_can_be_had_again_after_the_end(life: Life) -> None:
    life.words.allow()
    responses, _ = await read_all(life.ask())
    generation_id = responses[0].started.generation_id
    for point in (0, responses[-2].sequence, responses[-1].sequence):
        again, error = await read_all(life.resume(generation_id, point))
        assert error is None
        assert_grammar(again, point)
        assert again[-1].finished == responses[-1].finished
        known = [one for one in responses if one.sequence <= point]
        assert text_of([*known, *again]) == EVERYTHING


@pytest.mark.parametrize("name", ["", "nobody", "../" + "a" * 29, "f" * 32, "A" * 32, "x" * 5000])
async def test_an_unknown_generation_is_not_found(life: Life, name: str) -> None:
    _, error = await read_all(life.resume(name))
    assert error is not None
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")


async def test_a_point_that_was_never_sent_is_out_of_range_and_loses_nothing(life: Life) -> None:
    generation_id, before = await left_after(life, 3)
    for point in (before[-1].sequence + 1, 2**64 - 1):
        _, error = await read_all(life.resume(generation_id, point))
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "RESUME_POINT_GONE")
    life.words.allow()
    rest, error = await read_all(life.resume(generation_id, before[-1].sequence))
    assert error is None
    assert words_of([*before, *rest]) == list(range(len(WORDS)))


async def test_abort_ends_the_row_and_keeps_the_rest_and_a_second_one_drops_it(life: Life, store: FakeStore) -> None:
    life.words.allow(3)
    call = life.ask()
    before = await some(call, 3)
    generation_id = before[0].started.generation_id
    target = generation_pb2.AbortRequest(generation_id=generation_id)
    assert (await life.serving.generation.Abort(target)).status == generation_pb2.ABORT_STATUS_ABORTED
    rest, error = await read_all(call)
    assert error is not None
    assert error.code() is grpc.StatusCode.CANCELLED
    assert rest[-1].finished.finish_reason == result_pb2.FINISH_REASON_CANCELLED
    await life.until(lambda: not store.held)

    resumed = life.resume(generation_id, rest[-1].sequence)
    life.words.allow(5)
    more = await some(resumed, 2)
    assert words_of([*before, *more]) == list(range(5))
    assert (await life.serving.generation.Abort(target)).status == generation_pb2.ABORT_STATUS_ABORTED
    await read_all(resumed)
    await life.until(lambda: not store.held)

    by_request = generation_pb2.AbortRequest(request_id=before[0].started.request_id)
    assert (await life.serving.generation.Abort(by_request)).status == generation_pb2.ABORT_STATUS_NOT_RUNNING
    assert list(store.root.iterdir())  # that is the name of what runs alone
    assert (await life.serving.generation.Abort(target)).status == generation_pb2.ABORT_STATUS_NOT_RUNNING
    _, error = await read_all(life.resume(generation_id))
    assert error is not None
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert not list(store.root.iterdir())


async def test_an_abort_that_comes_after_the_end_keeps_it_as_one_before_would_and_a_second_one_drops_it(
    life: Life, store: FakeStore
) -> None:
    """Who leaves a stream may have read half of it while the server has sent all."""
    life.words.allow()
    responses, _ = await read_all(life.ask())
    generation_id = responses[0].started.generation_id
    target = generation_pb2.AbortRequest(generation_id=generation_id)
    answer = await life.serving.generation.Abort(target)
    assert answer.status == generation_pb2.ABORT_STATUS_NOT_RUNNING
    assert answer.stats.generated_tokens == len(WORDS)  # so that whoever asks several servers asks no other
    assert store.held == set()
    known = responses[:2]  # however much of the text was merged, there are so many
    again, error = await read_all(life.resume(generation_id, known[-1].sequence))
    assert error is None
    assert text_of([*known, *again]) == EVERYTHING
    for _ in range(2):
        await life.serving.generation.Abort(target)
    _, error = await read_all(life.resume(generation_id))
    assert error is not None
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert not list(store.root.iterdir())


async def test_a_failed_attempt_is_told_and_can_be_tried_again(life: Life, store: FakeStore) -> None:
    life.words.allow(3)
    call = life.ask()
    before = await some(call, 3)
    life.generations[0].abort(AbortReason.SHUTDOWN)
    rest, error = await read_all(call)
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert rest[-1].finished.error.retryable
    await life.until(lambda: not store.held)
    life.words.allow()
    more, error = await read_all(life.resume(before[0].started.generation_id, rest[-1].sequence))
    assert error is None
    assert words_of([*before, *more]) == list(range(len(WORDS)))


async def test_complete_joins_and_returns_everything(life: Life) -> None:
    await left_after(life, 4)
    life.words.allow()
    request = generation_pb2.CompleteRequest(text={"text": "hi"}, delivery={"durable": True})
    answer = await life.serving.generation.Complete(request)
    assert answer.text == EVERYTHING
    assert [token.index for token in answer.tokens] == list(range(len(WORDS)))
    assert answer.started.resumed_tokens >= 4


async def test_a_refusal_leaves_nothing_behind(life: Life, store: FakeStore) -> None:
    life.words.allow(1)
    await some(life.ask(request_id="same"), 1)
    request = generation_pb2.GenerateRequest(tokens={"ids": [8]}, request_id="same", delivery=DURABLE)
    _, error = await read_all(life.serving.generation.Generate(request))
    assert error is not None
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert len(list(store.root.iterdir())) == len(store.held) == 1


async def test_a_reader_that_stopped_reading_holds_nothing_up_and_loses_its_place_to_the_next(life: Life) -> None:
    big = "x" * 60_000

    async def flood(generation: FakeGeneration) -> None:
        generation.start()
        for _ in range(300):
            generation.say(big)
            await asyncio.sleep(0)
        generation.end()

    life.serving.engine.script = flood
    stuck = life.ask()
    first = await stuck.read()
    await life.until(lambda: life.generations[0].emitted == 300)
    await life.until(lambda: not life.serving.engine.live)
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    async with grpc.aio.insecure_channel(str(life.serving.address), options=options) as channel:
        point = generation_pb2.ResumeRequest(generation_id=first.started.generation_id, after_sequence=first.sequence)
        resume = channel.unary_stream(
            "/mlxstream.v1.GenerationService/Resume",
            request_serializer=generation_pb2.ResumeRequest.SerializeToString,
            response_deserializer=Response.FromString,
        )
        rest, error = await read_all(resume(point))
    assert error is None
    assert text_of(rest) == big * 300
    _, error = await read_all(stuck)
    assert error is not None
    assert reason_of(error) == "TAKEN_OVER"
