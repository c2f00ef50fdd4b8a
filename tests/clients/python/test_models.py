"""The calls beside generation: models, tokenizer, chat template, abort, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

import mlxstream
from mlxstream.v1.generation_pb2 import ABORT_STATUS_ABORTED, ABORT_STATUS_NOT_RUNNING
from mlxstream.v1.model_pb2 import GetModelRequest
from tests.clients.python.scripted_server import READINESS_SERVICE, ScriptedServer, answer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving(answer("hi")) as running:
        yield running


async def test_a_model_is_described_or_not_found(client: mlxstream.AsyncClient) -> None:
    assert (await client.model()).name == "tiny"
    with pytest.raises(mlxstream.NotFoundError, match="huge"):
        await client.model("huge")


async def test_models_are_listed_over_all_pages(client: mlxstream.AsyncClient) -> None:
    assert [model.name for model in await client.models()] == ["a", "b", "c"]


async def test_text_becomes_ids_and_ids_become_text(client: mlxstream.AsyncClient) -> None:
    ids = await client.tokenize("ab")
    assert ids == [97, 98]
    assert await client.detokenize(ids) == "ab"
    with pytest.raises(TypeError, match="argument 'ids': takes a list"):
        await client.detokenize(b"ab")


async def test_a_conversation_is_rendered(client: mlxstream.AsyncClient) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ["Hi", " there"]}]
    assert (await client.render_chat(messages)).text == "system: Be brief.\nuser: Hi there"


async def test_memory_is_estimated_for_every_row(client: mlxstream.AsyncClient) -> None:
    assert (await client.estimate_memory(prompt_tokens=30, max_tokens=10, rows=4)).kv_bytes == 160
    assert (await client.estimate_memory(prompt_tokens=30)).kv_bytes == 30


async def test_abort_tells_whether_something_was_running(client: mlxstream.AsyncClient) -> None:
    assert (await client.abort(request_id="r1")).status == ABORT_STATUS_ABORTED
    assert (await client.abort(generation_id="unknown")).status == ABORT_STATUS_NOT_RUNNING


async def test_health_follows_the_server(server: ScriptedServer, client: mlxstream.AsyncClient) -> None:
    assert await client.health() == "SERVING"
    await server.health.set(READINESS_SERVICE, HealthCheckResponse.NOT_SERVING)
    assert await client.health() == "NOT_SERVING"


async def test_waiting_for_readiness_ends_when_the_server_becomes_ready(
    server: ScriptedServer, client: mlxstream.AsyncClient
) -> None:
    await server.health.set(READINESS_SERVICE, HealthCheckResponse.NOT_SERVING)
    waiting = asyncio.create_task(client.wait_ready(timeout_seconds=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.health.set(READINESS_SERVICE, HealthCheckResponse.SERVING)
    await waiting


async def test_waiting_for_readiness_gives_up_in_time() -> None:
    async with mlxstream.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(mlxstream.UnavailableError, match="was not ready within") as caught:
            await client.wait_ready(timeout_seconds=0.2)
    assert caught.value.reason == mlxstream.LocalReason.NOT_READY


async def test_any_unary_call_of_the_schema_can_be_made(client: mlxstream.AsyncClient) -> None:
    answer = await client.call("ModelService/GetModel", GetModelRequest(model="tiny"))
    assert answer.model.name == "tiny"
    with pytest.raises(mlxstream.NotFoundError):
        await client.call("ModelService/GetModel", GetModelRequest(model="huge"))


@pytest.mark.parametrize("name", ["GenerationService/Generate", "ModelService/Nothing", "Nothing/GetModel", "GetModel"])
async def test_what_is_no_unary_call_is_refused(client: mlxstream.AsyncClient, name: str) -> None:
    with pytest.raises(ValueError, match="is no call of the schema"):
        await client.call(name, GetModelRequest())
