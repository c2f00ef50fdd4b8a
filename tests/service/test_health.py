"""Health tells the truth: about the process and each service, at every stage of an engine's life."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from engine.contracts.memory import MemoryReading
from engine.execution.engine import EngineState
from mlxstream.v1 import admin_pb2
from service import health as health_module
from service import readiness
from service.health import follow_engine
from service.offer import Offer
from service.readiness import NotReady
from tests.service.harness import Serving, reason_of

METHODS = sorted(health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name)
NAMES = ("", *Offer().service_names)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture(autouse=True)
def fast_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "POLL_SECONDS", 0.01)


def stub(serving: Serving) -> Any:
    return health_pb2_grpc.HealthStub(serving.channel)


async def statuses(serving: Serving) -> set[int]:
    """What Check says of every name."""
    checks = [stub(serving).Check(health_pb2.HealthCheckRequest(service=name)) for name in NAMES]
    return {(await check).status for check in checks}


@contextlib.asynccontextmanager
async def following(serving: Serving) -> AsyncIterator[Any]:
    """A watcher of one service while its health follows the engine."""
    watch = stub(serving).Watch(health_pb2.HealthCheckRequest(service="mlxstream.v1.GenerationService"))
    assert (await watch.read()).status == NOT_SERVING
    follower = asyncio.ensure_future(follow_engine(serving.engine, serving.health, stall_seconds=10))
    try:
        yield watch
    finally:
        follower.cancel()
        watch.cancel()


def test_readiness_is_told_of_each_service_by_its_full_name() -> None:
    assert set(Offer().service_names) == {
        "mlxstream.v1.GenerationService",
        "mlxstream.v1.ModelService",
        "mlxstream.v1.AdminService",
    }


async def test_everything_is_not_serving_before_the_model_is_warm(serving: Serving) -> None:
    assert await statuses(serving) == {NOT_SERVING}


async def test_everything_is_serving_once_the_engine_is_ready(serving: Serving) -> None:
    async with following(serving) as watch:
        assert (await watch.read()).status == SERVING
        assert await statuses(serving) == {SERVING}


async def test_a_step_that_takes_too_long_is_not_serving_until_it_ends(serving: Serving) -> None:
    async with following(serving) as watch:
        assert (await watch.read()).status == SERVING
        serving.engine.stalled = 11.0
        assert (await watch.read()).status == NOT_SERVING
        serving.engine.stalled = 0.0
        assert (await watch.read()).status == SERVING


async def test_a_dead_engine_is_not_serving_for_good(serving: Serving) -> None:
    async with following(serving) as watch:
        assert (await watch.read()).status == SERVING
        serving.engine.fail()
        assert (await watch.read()).status == NOT_SERVING
        assert await statuses(serving) == {NOT_SERVING}


async def test_an_engine_that_still_loads_is_not_serving(serving: Serving) -> None:
    serving.engine.state = EngineState.LOADING
    async with following(serving) as watch:
        await asyncio.sleep(0.05)
        assert await statuses(serving) == {NOT_SERVING}
        serving.engine.state = EngineState.READY
        assert (await watch.read()).status == SERVING


async def test_an_engine_without_a_model_is_alive_and_its_operators_are_served(serving: Serving) -> None:
    serving.engine.unloaded = True
    async with following(serving) as watch:
        operators = stub(serving).Watch(health_pb2.HealthCheckRequest(service="mlxstream.v1.AdminService"))
        while (await operators.read()).status != SERVING:
            pass
        assert (await stub(serving).Check(health_pb2.HealthCheckRequest())).status == SERVING
        check = health_pb2.HealthCheckRequest(service="mlxstream.v1.GenerationService")
        assert (await stub(serving).Check(check)).status == NOT_SERVING
        serving.engine.unloaded = False
        assert (await watch.read()).status == SERVING
        operators.cancel()


READING = MemoryReading(smallest_request_bytes=1000, state_limit_bytes=1_000_000, free_bytes=1 << 40, active_bytes=5000)


async def test_without_memory_services_are_not_ready_and_the_process_lives(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "LOW_SECONDS", 0.02)
    monkeypatch.setattr(readiness, "AMPLE_SECONDS", 0.02)
    serving.engine.reading = READING
    async with following(serving) as watch:
        assert (await watch.read()).status == SERVING
        assert (await serving.admin.GetLoad(admin_pb2.GetLoadRequest())).not_ready_reason == 0
        serving.engine.reading = dataclasses.replace(READING, free_bytes=1000)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub(serving).Check(health_pb2.HealthCheckRequest())).status == SERVING
        load = await serving.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.not_ready_reason == admin_pb2.NOT_READY_REASON_OUT_OF_MEMORY
        assert (load.memory_bytes, load.free_memory_bytes) == (5000, 1000)
        serving.engine.reading = READING
        assert (await watch.read()).status == SERVING


async def test_the_reason_is_logged_and_told_by_metrics(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.health")
    for reason in NotReady:
        serving.health.report(reason, alive=True)
        text = generate_latest(serving.telemetry.metrics.registry).decode()
        assert "\nmlx_stream_ready 0.0\n" in text
        told = re.findall(r'^mlx_stream_not_ready\{reason="(\w+)"\} 1.0$', text, re.M)
        assert told == [reason.value]
        assert caplog.records[-1].fields["reason"] == reason.value
    serving.health.report(None)
    text = generate_latest(serving.telemetry.metrics.registry).decode()
    assert "\nmlx_stream_ready 1.0\n" in text
    assert not re.search(r"^mlx_stream_not_ready\{.*\} 1.0$", text, re.M)


async def test_what_ends_for_good_keeps_its_reason(serving: Serving) -> None:
    serving.health.report(None)
    serving.health.drain()
    serving.health.report(None)
    assert serving.health.not_ready is NotReady.DRAINING
    load = await serving.admin.GetLoad(admin_pb2.GetLoadRequest())
    assert load.not_ready_reason == admin_pb2.NOT_READY_REASON_DRAINING
    serving.health.close()
    serving.health.report(None)
    assert serving.health.not_ready is NotReady.STOPPING


async def test_watchers_are_told_of_every_change_in_order_however_short(serving: Serving) -> None:
    watch = stub(serving).Watch(health_pb2.HealthCheckRequest(service="mlxstream.v1.GenerationService"))
    assert (await watch.read()).status == NOT_SERVING
    operators = stub(serving).Watch(health_pb2.HealthCheckRequest(service="mlxstream.v1.AdminService"))
    assert (await operators.read()).status == NOT_SERVING
    changes = (None, NotReady.STALLED, None, NotReady.OUT_OF_MEMORY, None, NotReady.FAILED)
    for not_ready in changes:
        serving.health.report(not_ready, alive=not_ready is not NotReady.FAILED)
    assert [(await watch.read()).status for _ in changes] == [SERVING, NOT_SERVING] * 3
    assert [(await operators.read()).status for _ in range(2)] == [SERVING, NOT_SERVING]
    serving.health.end_watches()
    for one in (watch, operators):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await one.read()
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_closed_health_never_serves_again(serving: Serving) -> None:
    async with following(serving) as watch:
        assert (await watch.read()).status == SERVING
        serving.health.close()
        assert (await watch.read()).status == NOT_SERVING
        serving.health.report(None)
        assert await statuses(serving) == {NOT_SERVING}


async def test_an_unknown_service_is_not_found_on_check_and_unknown_on_watch(serving: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub(serving).Check(health_pb2.HealthCheckRequest(service="mlxstream.v1.Other"))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert reason_of(failure.value) == "NOT_FOUND"
    assert failure.value.details() == "no service named 'mlxstream.v1.Other'"
    watch = stub(serving).Watch(health_pb2.HealthCheckRequest(service="mlxstream.v1.Other"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    watch.cancel()


@pytest.mark.skipif("List" not in METHODS, reason="the installed grpcio-health-checking knows no List yet")
async def test_list_tells_of_every_service_at_once(serving: Serving) -> None:
    answer = await stub(serving).List(health_pb2.HealthListRequest())
    assert {name: status.status for name, status in answer.statuses.items()} == dict.fromkeys(NAMES, NOT_SERVING)
    serving.health.report(None)
    answer = await stub(serving).List(health_pb2.HealthListRequest())
    assert {name: status.status for name, status in answer.statuses.items()} == dict.fromkeys(NAMES, SERVING)


@pytest.mark.parametrize("method", METHODS)
async def test_garbage_is_a_malformed_message_and_not_a_fault_of_ours(
    serving: Serving, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    multi = serving.channel.unary_stream if method == "Watch" else serving.channel.unary_unary
    call = multi(f"/grpc.health.v1.Health/{method}")(b"\x0a\x02\xff\xfe" if method != "List" else b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await (call.read() if method == "Watch" else call)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(failure.value) == "MALFORMED_MESSAGE"
    assert "ERROR" not in {record.levelname for record in caplog.records}


async def test_watchers_are_told_and_then_ended_by_us(serving: Serving) -> None:
    serving.health.report(None)
    watches = [stub(serving).Watch(health_pb2.HealthCheckRequest(service=name)) for name in NAMES]
    assert {(await watch.read()).status for watch in watches} == {SERVING}
    serving.health.end_watches()
    late = stub(serving).Watch(health_pb2.HealthCheckRequest())
    for watch in (*watches, late):
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await watch.read()
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(failure.value) == "UNAVAILABLE"
