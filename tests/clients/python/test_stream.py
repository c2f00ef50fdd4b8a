"""The asynchronous stream against a real server: what it gives, and how it ends."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

import mlxstream
from mlxstream.v1.generation_pb2 import GenerateRequest
from mlxstream.v1.result_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH
from tests.clients.python.scripted_server import (
    Context,
    Events,
    ScriptedServer,
    abort,
    answer,
    endless,
    eventually,
    serving,
    silent,
)


async def test_iterating_gives_the_text_and_then_the_account(client: mlxstream.AsyncClient) -> None:
    stream = client.stream("hi")
    assert stream.finish_reason is None
    assert [text async for text in stream] == ["Hello", ", ", "world"]
    assert stream.finish_reason is mlxstream.FinishReason.STOP
    assert stream.usage == mlxstream.Usage(prompt_tokens=3, generated_tokens=3)
    assert stream.stats is not None
    assert stream.stats.decode_tps == 5.0
    assert stream.started is not None
    assert stream.started.generation_id == "g1"


async def test_events_are_all_messages_in_their_order(client: mlxstream.AsyncClient) -> None:
    events = [event async for event in client.stream("hi").events()]
    assert [event.WhichOneof("event") for event in events] == ["started", "chunk", "chunk", "chunk", "finished"]
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5]


async def test_a_slow_reader_gets_everything_that_arrived_before_the_end(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    pieces = [f"{number} " for number in range(500)]
    server.generations.behaviour = answer(*pieces)
    received = []
    async for text in client.stream("count"):
        if not received:
            await eventually(lambda: server.generations.running == 0)
        received.append(text)
    assert received == pieces


async def test_break_ends_the_generation_at_once_although_the_stream_is_kept(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    server.generations.behaviour = endless
    stream = client.stream("hi")
    async for _ in stream:
        break
    await server.generations.cancelled.wait()
    assert [text async for text in stream] == []
    assert stream.finished is None


async def test_an_iterator_that_is_kept_goes_on_where_it_was(client: mlxstream.AsyncClient) -> None:
    iteration = aiter(client.stream("hi"))
    first = await anext(iteration)
    assert first + "".join([text async for text in iteration]) == "Hello, world"


async def test_leaving_the_context_ends_the_generation(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    server.generations.behaviour = endless
    async with client.stream("hi") as stream:
        iteration = aiter(stream)
        assert await anext(iteration) == "more "
    await server.generations.cancelled.wait()
    assert [text async for text in iteration] == []


async def test_an_error_in_the_loop_ends_the_generation(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    server.generations.behaviour = endless
    with pytest.raises(KeyError):
        async for _ in client.stream("hi"):
            raise KeyError
    await server.generations.cancelled.wait()


async def test_dropping_an_iteration_ends_the_generation(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    server.generations.behaviour = endless
    iteration = client.stream("hi").events()
    await anext(iteration)
    del iteration
    gc.collect()
    await server.generations.cancelled.wait()


@pytest.mark.parametrize("behaviour", [endless, silent])
async def test_cancelling_the_task_ends_the_generation(behaviour, server: ScriptedServer, client) -> None:
    server.generations.behaviour = behaviour

    async def read() -> None:
        async for _ in client.stream("hi"):
            pass

    task = asyncio.create_task(read())
    await eventually(lambda: server.generations.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.generations.cancelled.wait()


async def test_cancel_from_another_task_stops_the_iteration_without_an_error(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    server.generations.behaviour = silent
    stream = client.stream("hi")
    reading = asyncio.create_task(anext(aiter(stream), "stopped"))
    await eventually(lambda: server.generations.running == 1)
    stream.cancel()
    assert await reading == "stopped"
    await server.generations.cancelled.wait()


async def test_a_timeout_around_the_loop_is_a_timeout(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    server.generations.behaviour = silent

    async def over_once_it_is_served(limit: asyncio.Timeout) -> None:
        await eventually(lambda: bool(server.generations.requests))
        limit.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as beside:
            beside.create_task(over_once_it_is_served(limit))
            async for _ in client.stream("hi"):
                pass
    await server.generations.cancelled.wait()


async def test_a_stream_that_is_never_read_sends_nothing(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    async with client.stream("unread") as stream:
        stream.cancel()
    assert [text async for text in client.stream("read")] != []
    assert [request.text.text for request in server.generations.requests] == ["read"]


async def test_closing_the_client_ends_its_streams_with_an_error(server: ScriptedServer) -> None:
    server.generations.behaviour = endless
    client = mlxstream.AsyncClient(server.target)
    iteration = aiter(client.stream("hi"))
    await anext(iteration)
    await client.close()
    with pytest.raises(mlxstream.GenerationCancelledError, match="client was closed") as caught:
        while True:
            await anext(iteration)
    assert caught.value.reason == "CLIENT_CLOSED"


@pytest.mark.parametrize("durable", [False, True])
async def test_a_closed_client_says_so_to_every_later_call(server: ScriptedServer, durable: bool) -> None:
    client = mlxstream.AsyncClient(server.target)
    await client.health()
    await client.close()
    await client.close()
    later = (
        lambda: anext(aiter(client.stream("hi", durable=durable))),
        lambda: client.generate("hi"),
        lambda: client.health(),
        lambda: anext(client.watch_health()),
        lambda: client.abort(request_id="mine"),
    )
    for call in later:
        with pytest.raises(mlxstream.GenerationCancelledError, match="client was closed") as caught:
            await call()
        assert caught.value.reason == "CLIENT_CLOSED"


@pytest.mark.parametrize("durable", [False, True])
async def test_a_stream_knows_the_number_of_its_last_event(client: mlxstream.AsyncClient, durable: bool) -> None:
    stream = client.stream("hi", durable=durable)
    assert stream.sequence == 0
    numbers = [(event.sequence, stream.sequence) async for event in stream.events()]
    assert [number for number, _ in numbers] == [number for _, number in numbers]
    assert stream.sequence == len(numbers) > 1
    assert client.resume("g1", after_sequence=7).sequence == 7


async def test_a_stream_without_its_last_event_was_cut(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    async def cut(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")

    server.generations.behaviour = cut
    received = []
    with pytest.raises(mlxstream.StreamCutError) as caught:
        async for text in client.stream("hi"):
            received.append(text)
    assert received == ["half"]
    assert caught.value.reason == "STREAM_CUT"


async def test_an_error_after_the_start_keeps_what_the_last_event_said(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def fail(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("half")
        await events.finish(FINISH_REASON_ERROR)
        await abort(context, grpc.StatusCode.INTERNAL, "it broke", ErrorInfo(reason="GENERATION_FAILED"))

    server.generations.behaviour = fail
    stream = client.stream("hi")
    with pytest.raises(mlxstream.ServerError, match="it broke") as caught:
        async for _ in stream:
            pass
    assert caught.value.reason == "GENERATION_FAILED"
    assert stream.finish_reason is mlxstream.FinishReason.ERROR
    assert stream.usage.generated_tokens == 1


async def test_an_error_carries_its_reason_its_values_and_the_bad_fields(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        violation = BadRequest.FieldViolation(field="prompt", description="too long")
        info = ErrorInfo(reason="PROMPT_TOO_LONG", metadata={"context_length": "64"})
        await abort(
            context, grpc.StatusCode.INVALID_ARGUMENT, "too long", info, BadRequest(field_violations=[violation])
        )

    server.generations.behaviour = refuse
    with pytest.raises(mlxstream.PromptTooLongError) as caught:
        await client.generate("hi")
    assert isinstance(caught.value, mlxstream.InvalidRequestError)
    assert caught.value.metadata == {"context_length": "64"}
    assert caught.value.violations == (mlxstream.FieldViolation("prompt", "too long"),)
    assert caught.value.retry_after_seconds is None


async def test_an_overloaded_server_says_when_to_come_back(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def refuse(_request: GenerateRequest, context: Context) -> None:
        retry = RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ErrorInfo(reason="OVERLOADED"), retry)

    server.generations.behaviour = refuse
    with pytest.raises(mlxstream.OverloadedError) as caught:
        await anext(aiter(client.stream("hi")))
    assert caught.value.retry_after_seconds == 1.5


async def test_an_unavailable_server_is_tried_again_until_the_stream_has_begun(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    async def third_time(request: GenerateRequest, context: Context) -> None:
        if len(server.generations.requests) < 3:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "loading")
        await answer("ready")(request, context)

    server.generations.behaviour = third_time
    assert [text async for text in client.stream("hi")] == ["ready"]

    async def break_off(_request: GenerateRequest, context: Context) -> None:
        await Events(context).start()
        await abort(context, grpc.StatusCode.UNAVAILABLE, "stopping")

    server.generations.requests.clear()
    server.generations.behaviour = break_off
    with pytest.raises(mlxstream.UnavailableError):
        await anext(aiter(client.stream("hi")))
    assert len(server.generations.requests) == 1


async def test_messages_beyond_four_megabytes_pass_both_ways(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    large = "x" * 5_000_000
    server.generations.behaviour = answer(large)
    assert (await client.generate(large)).text == large
    assert len(server.generations.requests[0].text.text) == len(large)


async def test_generate_gives_the_whole_result(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    async def cut_short(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        await events.text("one ")
        await events.text("two")
        await events.finish(FINISH_REASON_LENGTH)

    server.generations.behaviour = cut_short
    result = await client.generate([1, 2], max_tokens=2, request_id="mine", model="tiny")
    assert result.text == "one two"
    assert result.token_ids == (100, 101)
    assert result.finish_reason == "length"
    assert result.stats.generated_tokens == 2
    assert repr(result) == "Generation('one two', finish_reason='length', prompt_tokens=3, generated_tokens=2)"
    (request,) = server.generations.requests
    assert (list(request.tokens.ids), request.options.max_tokens) == ([1, 2], 2)
    assert (request.request_id, request.model) == ("mine", "tiny")


async def test_what_a_person_sees_of_a_long_result_is_short(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    server.generations.behaviour = answer("word " * 100)
    shown = repr(await client.generate("hi"))
    assert shown.startswith("Generation('word word ")
    assert "…', finish_reason='stop'" in shown
    assert len(shown) < 160


async def test_a_stream_shows_how_far_it_is(client: mlxstream.AsyncClient) -> None:
    stream = client.stream("hi")
    assert repr(stream) == "<AsyncTextStream: no event yet, 0 generated tokens>"
    iteration = aiter(stream)
    await anext(iteration)
    assert repr(stream) == "<AsyncTextStream: under way, 1 generated tokens>"
    assert [text async for text in iteration] == [", ", "world"]
    assert repr(stream) == "<AsyncTextStream: stop, 3 generated tokens>"


async def test_metadata_goes_with_every_call(server: ScriptedServer) -> None:
    async with mlxstream.AsyncClient(server.target, metadata=[("x-tenant", "blue")]) as client:
        await client.generate("hi")
        assert [text async for text in client.stream("hi")] != []
    assert [seen["x-tenant"] for seen in server.generations.metadata] == ["blue", "blue"]


async def test_a_unix_socket_is_a_target(tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'socket'}"
    async with serving(answer("near"), listen=target), mlxstream.AsyncClient(target) as client:
        assert (await client.generate("hi")).text == "near"


def test_a_client_belongs_to_one_event_loop() -> None:
    client = mlxstream.AsyncClient("127.0.0.1:1")

    async def use() -> None:
        with pytest.raises(mlxstream.UnavailableError):
            await client.model()

    asyncio.run(use())

    async def use_again() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await client.model()
        await client.close()

    asyncio.run(use_again())
