"""The stream grammar and the shape of its messages, over a real loopback server."""

from __future__ import annotations

import asyncio

import pytest

from engine.contracts.prompt import TextPrompt
from engine.contracts.results import FinishReason
from mlxstream.v1 import delivery_pb2, generation_pb2, graph_pb2, result_pb2
from tests.service.fake_engine import MODEL, OPTIONS, FakeGeneration
from tests.service.harness import Serving, read_all, text_request

Responses = list[generation_pb2.GenerateResponse]


def kinds(responses: Responses) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def texts(responses: Responses) -> list[str]:
    return [response.chunk.text for response in responses if response.WhichOneof("event") == "chunk"]


def token_counts(responses: Responses) -> list[int]:
    return [len(response.chunk.tokens) for response in responses if response.WhichOneof("event") == "chunk"]


async def test_a_stream_is_started_then_chunks_then_finished(serving: Serving) -> None:
    responses, error = await read_all(serving.generation.Generate(text_request()))
    assert error is None
    assert kinds(responses)[0] == "started"
    assert kinds(responses)[-1] == "finished"
    assert set(kinds(responses)[1:-1]) == {"chunk"}
    assert "".join(texts(responses)) == "Hello!"
    assert sum(token_counts(responses)) == 3


async def test_messages_are_numbered_from_one_without_gaps(serving: Serving) -> None:
    responses, _ = await read_all(serving.generation.Generate(text_request()))
    assert [response.sequence for response in responses] == list(range(1, len(responses) + 1))


async def test_started_tells_what_will_really_run(serving: Serving) -> None:
    responses, _ = await read_all(serving.generation.Generate(text_request(request_id="mine")))
    started = responses[0].started
    assert started.request_id == "mine"
    assert started.generation_id == serving.engine.generations[0].generation_id
    assert started.model == MODEL.name
    assert started.weights_fingerprint == MODEL.fingerprint
    assert started.graph.graph_abi == "mlx-hidden-bsh-v1"
    assert started.execution.method == graph_pb2.GENERATION_METHOD_AUTOREGRESSIVE
    assert started.options.seed == OPTIONS.seed == 2**64 - 1
    assert started.options.HasField("temperature")
    assert list(started.options.eos_token_ids.ids) == [2, 3]
    assert not started.seed_was_explicit
    assert started.prompt_tokens == 5


async def test_finished_accounts_for_the_generation(serving: Serving) -> None:
    async def stop_at_a_sequence(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("a")
        generation.end(FinishReason.STOP, matched_stop="END")

    serving.engine.script = stop_at_a_sequence
    responses, _ = await read_all(serving.generation.Generate(text_request()))
    finished = responses[-1].finished
    assert finished.finish_reason == result_pb2.FINISH_REASON_STOP
    assert finished.matched_stop == "END"
    assert finished.stats.generated_tokens == 1
    assert finished.stats.queue_ms == 1.5
    assert not finished.HasField("error")


async def test_the_request_reaches_the_engine_as_it_was_sent(serving: Serving) -> None:
    request = text_request("Once", request_id="r-1", model="tiny", options={"seed": 0, "top_p": 0.0})
    await read_all(serving.generation.Generate(request))
    (seen,) = serving.engine.requests
    assert seen.prompt == TextPrompt("Once")
    assert (seen.request_id, seen.model, seen.caller) == ("r-1", "tiny", "")
    assert (seen.options.seed, seen.options.top_p, seen.options.top_k) == (0, 0.0, None)


async def test_complete_returns_what_the_stream_would_have_carried(serving: Serving) -> None:
    responses, _ = await read_all(serving.generation.Generate(text_request()))
    answer = await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}))
    assert answer.text == "".join(texts(responses)) == "Hello!"
    streamed = [token for response in responses for token in response.chunk.tokens]
    assert list(answer.tokens) == streamed
    assert answer.started.options == responses[0].started.options
    assert answer.finished == responses[-1].finished


async def test_text_and_bytes_and_cached_ids_come_only_when_wanted(serving: Serving) -> None:
    plain, _ = await read_all(serving.generation.Generate(text_request()))
    assert [token.text_bytes for response in plain for token in response.chunk.tokens] == [b"", b"", b""]
    assert list(plain[-1].finished.stats.cache_tokens) == []

    wanted = {"include_text": False, "include_token_bytes": True, "include_cache_tokens": True}
    rich, _ = await read_all(serving.generation.Generate(text_request(delivery=wanted)))
    assert set(texts(rich)) == {""}
    assert [token.text_bytes for response in rich for token in response.chunk.tokens] == [b"Hel", b"lo", b"!"]
    assert list(rich[-1].finished.stats.cache_tokens) == [7, 8]

    answer = await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}, delivery=wanted))
    assert answer.text == ""
    assert [token.text_bytes for token in answer.tokens] == [b"Hel", b"lo", b"!"]


async def test_a_message_holds_no_more_tokens_than_asked_for(serving: Serving) -> None:
    async def burst(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("a", "b", "c", "d", "e")
        generation.end()

    serving.engine.script = burst
    delivery = {"max_tokens_per_message": 2}
    responses, _ = await read_all(serving.generation.Generate(text_request(delivery=delivery)))
    assert token_counts(responses) == [2, 2, 1]
    assert "".join(texts(responses)) == "abcde"


async def test_tokens_wait_for_each_other_up_to_the_delay(serving: Serving) -> None:
    async def drip(generation: FakeGeneration) -> None:
        generation.start()
        for text in "abcdef":
            generation.say(text)
            await asyncio.sleep(0.005)
        generation.end()

    serving.engine.script = drip
    delivery = delivery_pb2.DeliveryOptions(max_tokens_per_message=4)
    delivery.max_delay.FromSeconds(60)
    responses, _ = await read_all(serving.generation.Generate(text_request(delivery=delivery)))
    assert token_counts(responses) == [4, 2]


async def test_a_delayed_token_is_sent_when_its_time_has_come(serving: Serving) -> None:
    async def one_then_silence(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("a")
        await asyncio.Event().wait()

    serving.engine.script = one_then_silence
    delivery = delivery_pb2.DeliveryOptions()
    delivery.max_delay.FromMilliseconds(30)
    call = serving.generation.Generate(text_request(delivery=delivery))
    assert (await call.read()).WhichOneof("event") == "started"
    assert (await call.read()).chunk.text == "a"
    call.cancel()


async def test_heartbeats_break_the_silence_with_the_progress_of_the_prompt(serving: Serving) -> None:
    async def long_prefill(generation: FakeGeneration) -> None:
        generation.start()
        generation.progress(40, 100)
        await asyncio.Event().wait()

    serving.engine.script = long_prefill
    delivery = delivery_pb2.DeliveryOptions()
    delivery.heartbeat_interval.FromMilliseconds(20)
    call = serving.generation.Generate(text_request(delivery=delivery))
    first, *beats = [await call.read() for _ in range(4)]
    assert first.WhichOneof("event") == "started"
    assert kinds(beats) == ["heartbeat"] * 3
    assert (beats[-1].heartbeat.prefilled_tokens, beats[-1].heartbeat.prompt_tokens) == (40, 100)
    call.cancel()


async def test_no_heartbeat_comes_before_started_so_that_retries_stay_possible(serving: Serving) -> None:
    async def slow_queue(generation: FakeGeneration) -> None:
        await asyncio.sleep(0.1)
        generation.start()
        generation.end()

    serving.engine.script = slow_queue
    delivery = delivery_pb2.DeliveryOptions()
    delivery.heartbeat_interval.FromMilliseconds(10)
    responses, _ = await read_all(serving.generation.Generate(text_request(delivery=delivery)))
    assert kinds(responses)[0] == "started"


async def test_a_slow_reader_gets_everything_in_fewer_messages(serving: Serving) -> None:
    total = 20_000

    async def flood(generation: FakeGeneration) -> None:
        generation.start()
        for _ in range(total // 50):
            generation.say(*["x" * 20] * 50)
            await asyncio.sleep(0)
        generation.end()

    serving.engine.script = flood
    call = serving.generation.Generate(text_request())
    await call.read()
    await asyncio.wait_for(serving.engine.generations[0].finished(), 60)
    responses, error = await read_all(call)
    assert error is None
    assert [token.index for response in responses for token in response.chunk.tokens] == list(range(total))
    assert max(token_counts(responses)) > 50
    assert max(response.ByteSize() for response in responses) < 4 * 1024 * 1024


@pytest.mark.parametrize("rpc", ["Generate", "Complete"])
async def test_one_line_is_logged_per_generation_without_its_text(
    serving: Serving, rpc: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if rpc == "Generate":
        await read_all(serving.generation.Generate(text_request("a secret", request_id="r-7")))
    else:
        request = generation_pb2.CompleteRequest(text={"text": "a secret"}, request_id="r-7")
        await serving.generation.Complete(request)
    await serving.live.wait_idle()
    (record,) = [record for record in caplog.records if record.message == "generation finished"]
    fields = record.__dict__["fields"]
    assert (fields["request_id"], fields["finish_reason"], fields["generated_tokens"]) == ("r-7", "stop", 3)
    assert "secret" not in caplog.text + str(fields)
