"""Operators at work over the wire: models and adapters change under load, draining ends streams, gauges follow."""

import asyncio
import json

import grpc
import pytest

from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, model_pb2
from service.readiness import NotReady
from tests.engine import tiny_model
from tests.engine.adapters import tiny_adapters
from tests.engine.execution.holding import held_after
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import until
from tests.whole.calls import outcome, started
from tests.whole.conftest import CONTEXT, serving


@pytest.fixture
async def changing(tmp_path):
    """A server of a model of its own, with a folder of adapters."""
    oracle = tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    tiny_adapters.write_mlx(tmp_path / "adapters" / "a", tiny_adapters.adapt(oracle.model))
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    async with serving(tmp_path / "tiny", tmp_path / "state", adapters_dir=tmp_path / "adapters") as whole:
        yield whole, admin_pb2_grpc.AdminServiceStub(whole.channel), tmp_path


def request(max_tokens=12, **options):
    return generation_pb2.GenerateRequest(
        tokens={"ids": random_prompt(1, 20)},
        options={"max_tokens": max_tokens, "eos_token_ids": {"ids": []}, **options},
    )


async def ids_of(whole, asked):
    return [token.token async for response in whole.generation.Generate(asked) for token in response.chunk.tokens]


async def test_a_model_is_replaced_while_a_stream_of_the_old_one_runs_to_its_end(changing):
    whole, admin, tmp_path = changing
    wanted = await ids_of(whole, request(300))
    oracle = tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT, seed=23)
    running = await started(whole.generation.Generate(request(300)))
    events = [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest(model="tiny"))]
    assert events[-1].loaded.name == "tiny"
    assert {event.progress.phase for event in events[:-1]} >= {admin_pb2.LOAD_PHASE_READING}
    assert await ids_of(whole, request()) == oracle.greedy(random_prompt(1, 20), 12)
    ids, _, error = await outcome(running)
    assert (ids, error) == (wanted, None)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
async def test_a_broken_model_is_refused_without_a_path_and_the_old_one_serves(changing, file):
    whole, admin, tmp_path = changing
    wanted = await ids_of(whole, request())
    path = tmp_path / "tiny" / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
    assert failure.value.code() is grpc.StatusCode.DATA_LOSS
    assert file in (failure.value.details() or "")
    assert str(tmp_path) not in str(failure.value)
    assert await ids_of(whole, request()) == wanted


async def test_without_a_model_requests_are_unavailable_and_operators_are_answered(changing):
    whole, admin, _ = changing
    await admin.UnloadModel(admin_pb2.UnloadModelRequest(model="tiny"))
    for call in (whole.models.GetModel(model_pb2.GetModelRequest()), ids_of(whole, request())):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert failure.value.details() == "no model is loaded"
    load = await admin.GetLoad(admin_pb2.GetLoadRequest())
    assert (load.model, load.max_rows) == ("", 0)
    [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
    assert len(await ids_of(whole, request())) == 12


async def test_an_adapter_comes_and_goes_and_the_model_tells_of_it(changing):
    whole, admin, _ = changing
    base = await ids_of(whole, request())
    await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="a"))
    model = (await whole.models.GetModel(model_pb2.GetModelRequest())).model
    assert [one.id for one in model.adapters] == ["x"]
    adapted = await ids_of(whole, request(adapters=[{"id": "x"}]))
    assert adapted != base
    assert await ids_of(whole, request()) == base
    listed = (await admin.ListAdapters(admin_pb2.ListAdaptersRequest())).adapters
    assert (listed[0].id, listed[0].revision) == ("x", model.adapters[0].revision)
    await admin.UnmountAdapter(admin_pb2.UnmountAdapterRequest(id="x"))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ids_of(whole, request(adapters=[{"id": "x"}]))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_adapter_that_does_not_fit_is_told_from_one_that_is_damaged(changing):
    _, admin, tmp_path = changing
    rank = json.loads((tmp_path / "adapters" / "a" / "adapter_config.json").read_text())
    rank["lora_parameters"]["rank"] += 1
    (tmp_path / "adapters" / "a" / "adapter_config.json").write_text(json.dumps(rank))
    assert await refusal_of_mounting(admin) is grpc.StatusCode.FAILED_PRECONDITION
    (tmp_path / "adapters" / "a" / "adapters.safetensors").write_bytes(b"cut")
    assert await refusal_of_mounting(admin) is grpc.StatusCode.DATA_LOSS


async def refusal_of_mounting(admin):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="a"))
    assert "a/adapters.safetensors" in (failure.value.details() or "")
    return failure.value.code()


async def test_draining_with_a_live_stream_refuses_the_next_and_lets_the_first_end(changing):
    whole, admin, _ = changing
    with held_after(10):
        first = await started(whole.generation.Generate(request(100)))
        (one,) = (await admin.ListGenerations(admin_pb2.ListGenerationsRequest())).generations
        assert (one.model, one.prompt_tokens) == ("tiny", 20)
        draining = asyncio.create_task(_drained(admin))
        await until(lambda: whole.health.not_ready is NotReady.DRAINING)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ids_of(whole, request())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    ids, _, error = await outcome(first)
    assert (len(ids), error) == (100, None)
    assert (await draining).finished_generations == 1


async def _drained(admin):
    return await admin.Drain(admin_pb2.DrainRequest())
