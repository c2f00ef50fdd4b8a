"""Health over a real engine: a stuck step, a reload, no model, another model; watchers see each change and no other."""

import asyncio
import contextlib
import threading

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.execution import packed_method
from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from service import health as health_module
from service.health import Health, follow_engine
from service.readiness import NotReady
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import until
from tests.whole.conftest import serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = "mlxstream.v1.GenerationService"


@pytest.fixture
async def followed(whole_folder, tmp_path, monkeypatch, request):
    """A server whose health follows its engine, and what watchers of each name were told.

    Its parameter, in seconds, is how long a step may take.
    """
    monkeypatch.setattr(health_module, "POLL_SECONDS", 0.02)
    made, real = [], Health.__init__

    def remember(self, names):
        made.append(self)
        real(self, names)

    monkeypatch.setattr(Health, "__init__", remember)
    async with serving(whole_folder, tmp_path) as whole:
        told = {"": [], GENERATION: []}
        stub = health_pb2_grpc.HealthStub(whole.channel)
        tasks = [asyncio.create_task(_watch(stub, name, told[name])) for name in told]
        tasks.append(
            asyncio.create_task(follow_engine(whole.engine, made[0], stall_seconds=getattr(request, "param", 60)))
        )
        await until(lambda: all(told.values()) and told[GENERATION][-1] == SERVING)
        yield whole, told
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _watch(stub, name, told):
    async for response in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
        told.append(response.status)


def asked():
    return generation_pb2.GenerateRequest(
        tokens={"ids": random_prompt(1, 5)}, options={"max_tokens": 3, "eos_token_ids": {"ids": []}}
    )


@pytest.mark.parametrize("followed", [0.3], indirect=True)
async def test_a_stuck_step_ends_liveness_and_readiness_until_it_goes_on(followed, monkeypatch):
    whole, told = followed
    go_on, real = threading.Event(), packed_method.dispatch_packed_step

    def stuck(binding, rows, after):
        go_on.wait(60)
        return real(binding, rows, after)

    monkeypatch.setattr(packed_method, "dispatch_packed_step", stuck)
    call = whole.generation.Generate(asked())
    await until(lambda: told[""][-1] == NOT_SERVING and told[GENERATION][-1] == NOT_SERVING)
    go_on.set()
    assert [response async for response in call][-1].HasField("finished")
    await until(lambda: told[""][-1] == SERVING and told[GENERATION][-1] == SERVING)
    assert told[GENERATION][-3:] == [SERVING, NOT_SERVING, SERVING]


async def test_a_reload_is_no_news_and_no_model_is_no_readiness(followed):
    whole, told = followed
    admin = admin_pb2_grpc.AdminServiceStub(whole.channel)
    before = {name: len(news) for name, news in told.items()}
    [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
    await asyncio.sleep(0.1)
    assert {name: len(news) for name, news in told.items()} == before
    await admin.UnloadModel(admin_pb2.UnloadModelRequest(model="tiny"))
    await until(lambda: told[GENERATION][-1] == NOT_SERVING)
    assert told[""][-1] == SERVING
    [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
    await until(lambda: told[GENERATION][-1] == SERVING)
    assert len(told[""]) == before[""]


async def test_a_model_that_comes_or_goes_is_told_before_whoever_asked_for_it_is_answered(
    whole_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(health_module, "POLL_SECONDS", 3600)
    async with serving(whole_folder, tmp_path) as whole:
        follower = asyncio.create_task(follow_engine(whole.engine, whole.health, stall_seconds=60))
        admin, stub, told = (
            admin_pb2_grpc.AdminServiceStub(whole.channel),
            health_pb2_grpc.HealthStub(whole.channel),
            [],
        )
        watch = asyncio.create_task(_watch(stub, GENERATION, told))
        await until(lambda: told and told[-1] == SERVING)
        before = len(told)
        for _ in range(3):
            await admin.UnloadModel(admin_pb2.UnloadModelRequest(model="tiny"))
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION))).status == NOT_SERVING
            load = await admin.GetLoad(admin_pb2.GetLoadRequest())
            assert load.not_ready_reason == admin_pb2.NOT_READY_REASON_NO_MODEL
            [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION))).status == SERVING
        await until(lambda: len(told) == before + 6)
        assert told[before:] == [NOT_SERVING, SERVING] * 3
        for task in (follower, watch):
            task.cancel()


async def test_a_server_in_whose_memory_no_request_fits_is_not_ready_and_says_why(whole_folder, tmp_path):
    async with serving(whole_folder, tmp_path, state_bytes=1) as whole:
        follower = asyncio.create_task(follow_engine(whole.engine, whole.health, stall_seconds=10))
        await until(lambda: whole.health.not_ready is NotReady.OUT_OF_MEMORY)
        load = await admin_pb2_grpc.AdminServiceStub(whole.channel).GetLoad(admin_pb2.GetLoadRequest())
        assert load.not_ready_reason == admin_pb2.NOT_READY_REASON_OUT_OF_MEMORY
        assert load.memory_bytes >= whole.engine.model.weights_bytes
        assert load.free_memory_bytes > 0
        stub = health_pb2_grpc.HealthStub(whole.channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION))).status == NOT_SERVING
        follower.cancel()
