"""Durable generations over a real loopback server: who reads them, who is told what, and what outlives whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.contracts.cancellation import AbortReason
from mlxstream.v1 import generation_pb2, result_pb2
from tests.service.durable.fake_store import FakeStore
from tests.service.fake_engine import FakeEngine, FakeGeneration
from tests.service.harness import Serving, read_all, reason_of, serve, text_request

WORDS = tuple(f"w{place} " for place in range(12))
EVERYTHING = "".join(WORDS)
DURABLE = {"durable": True, "heartbeat_interval": {"seconds": 1}}

Response = generation_pb2.GenerateResponse


class Words:
    """A script that says `WORDS` one by one, as far as it is let, after what was known before."""

    def __init__(self) -> None:
        self.allowed = 0
        self._changed = asyncio.Event()

    def allow(self, words: int = len(WORDS)) -> None:
        self.allowed = words
        self._changed.set()

    async def __call__(self, generation: FakeGeneration) -> None:
        generation.start(resumed_tokens=len(generation.known))
        if generation.known:
            generation.say(*WORDS[: len(generation.known)])
        while generation.emitted < len(WORDS):
            while generation.emitted >= self.allowed:
                self._changed.clear()
                await self._changed.wait()
            generation.say(WORDS[generation.emitted])
            await asyncio.sleep(0)
        generation.end()


class Life:
    """A server over a store that outlives it."""

    def __init__(self, serving: Serving, words: Words) -> None:
        self.serving = serving
        self.words = words

    @property
    def generations(self) -> list[FakeGeneration]:
        return self.serving.engine.generations

    def ask(self, **fields: Any) -> Any:
        request = text_request(**{"delivery": DURABLE, **fields})
        return self.serving.generation.Generate(request)

    def resume(self, generation_id: str, after_sequence: int = 0) -> Any:
        request = generation_pb2.ResumeRequest(generation_id=generation_id, after_sequence=after_sequence)
        return self.serving.generation.Resume(request)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - any condition of the test
                await asyncio.sleep(0.01)


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


@pytest.fixture
async def life(store: FakeStore) -> AsyncIterator[Life]:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        yield Life(serving, words)


def engine_of(store: FakeStore, words: Words) -> FakeEngine:
    engine = FakeEngine(durable_store=store)
    engine.script = words
    return engine


async def some(call: Any, tokens: int) -> list[Response]:
    """Responses, Started included, until so many tokens have come."""
    responses: list[Response] = []
    while len(words_of(responses)) < tokens or not responses:
        responses.append(await call.read())
    return responses


def words_of(responses: list[Response]) -> list[int]:
    return [token.index for response in responses for token in response.chunk.tokens]


def text_of(responses: list[Response]) -> str:
    return "".join(response.chunk.text for response in responses)


def kinds(responses: list[Response]) -> list[str]:
    return [str(response.WhichOneof("event")) for response in responses]


def assert_grammar(responses: list[Response], after_sequence: int = 0) -> None:
    first = max(1, after_sequence)
    assert [one.sequence for one in responses] == [first + place for place in range(len(responses))]
    assert kinds(responses)[0] == "started"
    assert "started" not in kinds(responses)[1:]
    assert kinds(responses)[-1] == "finished"


async def left_after(life: Life, tokens: int, **fields: Any) -> tuple[str, list[Response]]:
    """A stream whose connection ends after so many tokens; the generation stays."""
    life.words.allow(tokens)
    call = life.ask(**fields)
    responses = await some(call, tokens)
    call.cancel()
    (generation,) = life.serving.durable.here
    await life.until(lambda: not generation.is_read)
    return responses[0].started.generation_id, responses


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
        again, error = await read_all(life.resume(responses[0].started.generation_id, 3))
        assert error is None
        assert_grammar(again, 3)
        assert text_of([*responses[:3], *again]) == EVERYTHING
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


async def test_a_damaged_log_is_data_loss_where_its_end_is_needed_and_none_where_it_is_not(store: FakeStore) -> None:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        generation_id, before = await left_after(Life(serving, words), 5)
    log = store.root / generation_id / "tokens.log"
    log.write_bytes(log.read_bytes()[:-1])
    async with serve(engine_of(store, words)) as serving:
        life = Life(serving, words)
        words.allow()
        _, error = await read_all(life.resume(generation_id, before[-1].sequence))
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "CHECKPOINT_DAMAGED")
        rest, error = await read_all(life.resume(generation_id, before[-2].sequence))
        assert error is None
        assert words_of([*before[:-1], *rest]) == list(range(len(WORDS)))


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

    assert (await life.serving.generation.Abort(target)).status == generation_pb2.ABORT_STATUS_NOT_RUNNING
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
    await asyncio.wait_for(life.serving.live.wait_idle(), 5)
    await life.until(lambda: not store.held)
    _, error = await read_all(life.resume(generation_id))
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE


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
