"""AdminService over the scripted engine: what operators ask reaches the engine, and what it says reaches them."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.contracts.errors import CorruptArtifactError, OverloadedError
from engine.contracts.load import EngineLoad, LoadPhase, LoadProgress
from mlxstream.v1 import admin_pb2, model_pb2
from service.load_meter import LoadMeter
from tests.service.fake_engine import MODEL, FakeGeneration, adapter, never_end, never_start
from tests.service.harness import Serving, read_all, reason_of, text_request, violated_fields
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


async def health_of(serving: Serving, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(serving.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_a_load_streams_its_phases_and_ends_with_the_model(serving: Serving) -> None:
    serving.engine.progress = [
        LoadProgress(phase=LoadPhase.FETCHING, done_bytes=5, total_bytes=10),
        LoadProgress(phase=LoadPhase.READING, done_bytes=1, total_bytes=9),
        LoadProgress(phase=LoadPhase.WARMING),
    ]
    responses, error = await read_all(serving.admin.LoadModel(admin_pb2.LoadModelRequest(model="org/name")))
    assert error is None
    assert responses[-1].loaded.name == "tiny"
    phases = [response.progress.phase for response in responses[:-1]]
    assert phases == sorted(phases)
    assert phases[-1] == admin_pb2.LOAD_PHASE_WARMING
    assert serving.engine.changes == [("load", "org/name")]


async def test_a_load_that_fails_tells_how_far_it_came_and_why(serving: Serving) -> None:
    serving.engine.progress = [LoadProgress(phase=LoadPhase.READING, done_bytes=1, total_bytes=9)]
    serving.engine.load_error = CorruptArtifactError("model.safetensors", "is cut")
    responses, error = await read_all(serving.admin.LoadModel(admin_pb2.LoadModelRequest()))
    assert [response.progress.done_bytes for response in responses] == [1]
    assert error is not None
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert error.details() == "model.safetensors: is cut"


async def test_a_second_load_is_told_when_to_come_back(serving: Serving) -> None:
    serving.engine.load_error = OverloadedError("the place", limit=1, used=1, retry_after_seconds=5.0)
    _, error = await read_all(serving.admin.LoadModel(admin_pb2.LoadModelRequest()))
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "5000"


async def test_a_caller_who_leaves_ends_the_load(serving: Serving) -> None:
    serving.engine.load_gate.clear()
    serving.engine.progress = [LoadProgress(phase=LoadPhase.READING)]
    call = serving.admin.LoadModel(admin_pb2.LoadModelRequest())
    await call.read()
    call.cancel()
    await until(lambda: ("load given up",) in serving.engine.changes)


async def test_unloading_needs_a_name_and_tells_what_it_freed(serving: Serving) -> None:
    error = await refused(serving.admin.UnloadModel(admin_pb2.UnloadModelRequest()))
    assert violated_fields(error) == ["model"]
    answer = await serving.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="tiny"))
    assert (answer.freed_bytes, answer.aborted_generations) == (1000, 2)


async def test_adapters_are_mounted_and_taken_off_as_asked(serving: Serving) -> None:
    answer = await serving.admin.MountAdapter(admin_pb2.MountAdapterRequest(id="a", source="folder", model="tiny"))
    assert answer.adapter == admin_pb2.AdapterInfo(
        id="a", revision="sha256:a", rank=8, scale=2.5, mounted_layers=2, skipped_tensors=2, file_bytes=400,
        resident_bytes=300,
    )  # fmt: skip
    off = await serving.admin.UnmountAdapter(admin_pb2.UnmountAdapterRequest(id="a"))
    assert off.freed_bytes == 300
    assert serving.engine.changes == [("mount", "a", "folder", "tiny"), ("unmount", "a", "")]


async def test_mounted_adapters_are_listed_by_id_in_pages_and_shown_with_the_model(serving: Serving) -> None:
    serving.engine.info = dataclasses.replace(MODEL, adapters=tuple(adapter(name) for name in "cab"))
    request, found = admin_pb2.ListAdaptersRequest(page_size=2), []
    while True:
        page = await serving.admin.ListAdapters(request)
        found.append([one.id for one in page.adapters])
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert found == [["a", "b"], ["c"]]
    model = (await serving.models.GetModel(model_pb2.GetModelRequest())).model
    assert [one.id for one in model.adapters] == ["c", "a", "b"]
    assert model.adapters[0] == model_pb2.MountedAdapter(id="c", revision="sha256:c", rank=8, scale=2.5)


@pytest.mark.parametrize("page_token", ["x", "after-", "after-" + "x" * 300])
async def test_a_page_token_of_somebody_else_is_refused(serving: Serving, page_token: str) -> None:
    for call in (
        serving.admin.ListAdapters(admin_pb2.ListAdaptersRequest(page_token=page_token)),
        serving.admin.ListGenerations(admin_pb2.ListGenerationsRequest(page_token=page_token)),
    ):
        assert violated_fields(await refused(call)) == ["page_token"]


async def test_another_models_adapters_are_not_found(serving: Serving) -> None:
    error = await refused(serving.admin.ListAdapters(admin_pb2.ListAdaptersRequest(model="other")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_live_generations_are_listed_oldest_first_and_none_is_lost_or_seen_twice(serving: Serving) -> None:
    serving.engine.script = never_end("a", "b")
    calls = [serving.generation.Generate(text_request(request_id=f"r{index}")) for index in range(5)]
    for call in calls:
        await call.read()
    first = await serving.admin.ListGenerations(admin_pb2.ListGenerationsRequest(page_size=2))
    seen = [one.request_id for one in first.generations]
    calls[int(seen[0][1])].cancel()
    await until(lambda: len(serving.engine.live) == 4)
    rest = await serving.admin.ListGenerations(
        admin_pb2.ListGenerationsRequest(page_size=50, page_token=first.next_page_token)
    )
    seen += [one.request_id for one in rest.generations]
    assert sorted(seen) == [f"r{index}" for index in range(5)]
    assert rest.next_page_token == ""
    one = rest.generations[0]
    assert (one.phase, one.model) == (admin_pb2.GENERATION_PHASE_DECODING, "tiny")
    assert (one.prompt_tokens, one.prefilled_tokens, one.generated_tokens) == (5, 4, 2)
    assert one.create_time.seconds > 0


async def test_the_load_is_told_in_every_state(serving: Serving) -> None:
    serving.engine.busy = EngineLoad(
        running=3, queued=2, row_limit=8, queue_limit=64, state_bytes=50, state_limit_bytes=200, prefix_bytes=10,
        prefix_limit_bytes=40, step_age_seconds=1.5, generated_tokens=70, prefilled_tokens=90,
    )  # fmt: skip
    load = await serving.admin.GetLoad(admin_pb2.GetLoadRequest())
    assert (load.running, load.queued, load.max_rows, load.queue_limit) == (3, 2, 8, 64)
    assert (load.kv_utilization, load.kv_bytes, load.kv_limit_bytes) == (0.25, 50, 200)
    assert (load.prefix_cache_bytes, load.prefix_cache_limit_bytes) == (10, 40)
    assert (load.step_age.seconds, load.step_age.nanos) == (1, 500_000_000)
    assert (load.model, load.draining, load.generated_tokens, load.prefilled_tokens) == ("tiny", False, 70, 90)
    serving.engine.fail()
    assert (await serving.admin.GetLoad(admin_pb2.GetLoadRequest())).model == ""


def test_rates_are_those_of_the_last_seconds() -> None:
    now, load = [0.0], [EngineLoad()]
    meter = LoadMeter(lambda: load[0], lambda: now[0])
    assert meter.rates().decode_tps == 0
    for second in range(1, 21):
        now[0] = float(second)
        load[0] = EngineLoad(generated_tokens=10 * second if second <= 10 else 100, prefilled_tokens=second)
        meter.sample()
        if second == 10:
            assert meter.rates().decode_tps == pytest.approx(10)
    assert meter.rates().decode_tps == 0
    assert meter.rates().prefill_tps == pytest.approx(1)


@pytest.mark.parametrize("salt", [None, "", "s"])
async def test_prefixes_are_forgotten_all_or_those_of_one_salt(serving: Serving, salt: str | None) -> None:
    answer = await serving.admin.ClearPrefixCache(admin_pb2.ClearPrefixCacheRequest(salt=salt))
    assert (answer.cleared_entries, answer.freed_bytes) == (3, 4000)
    assert serving.engine.changes == [("clear", "", salt)]


async def test_draining_refuses_new_work_and_answers_when_the_last_stream_has_ended(serving: Serving) -> None:
    release = asyncio.Event()

    async def short(generation: FakeGeneration) -> None:
        generation.start()
        await release.wait()
        generation.end()

    serving.engine.script = short
    serving.health.report(None)
    running = serving.generation.Generate(text_request())
    await running.read()
    draining = asyncio.ensure_future(serving.admin.Drain(admin_pb2.DrainRequest()))
    await until(lambda: serving.live.is_draining)
    _, error = await read_all(serving.generation.Generate(text_request()))
    assert error is not None
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
    assert (await serving.admin.GetLoad(admin_pb2.GetLoadRequest())).draining
    assert not draining.done()
    release.set()
    responses, error = await read_all(running)
    assert error is None
    assert responses[-1].WhichOneof("event") == "finished"
    answer = await draining
    assert (answer.finished_generations, answer.aborted_generations) == (1, 0)


async def test_draining_ends_readiness_and_keeps_liveness(serving: Serving) -> None:
    serving.health.report(None)
    await serving.admin.Drain(admin_pb2.DrainRequest())
    assert await health_of(serving, "mlxstream.v1.GenerationService") == NOT_SERVING
    assert await health_of(serving, "") == SERVING
    serving.health.report(None)
    assert await health_of(serving, "mlxstream.v1.GenerationService") == NOT_SERVING


async def test_what_still_runs_when_the_time_to_drain_is_up_ends_as_unavailable(serving: Serving) -> None:
    serving.engine.script = never_end("a")
    running = serving.generation.Generate(text_request())
    await running.read()
    request = admin_pb2.DrainRequest()
    request.timeout.FromMilliseconds(50)
    answer = await serving.admin.Drain(request)
    assert (answer.finished_generations, answer.aborted_generations) == (0, 1)
    responses, error = await read_all(running)
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert responses[-1].finished.stats.generated_tokens == 1


async def test_draining_waits_for_queued_generations_too(serving: Serving) -> None:
    serving.engine.script = never_start
    waiting = asyncio.ensure_future(read_all(serving.generation.Generate(text_request())))
    await serving.engine.accepted.wait()
    await until(lambda: serving.live.count == 1)
    request = admin_pb2.DrainRequest()
    request.timeout.FromMilliseconds(50)
    assert (await serving.admin.Drain(request)).aborted_generations == 1
    _, error = await waiting
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_on_its_way_in_when_draining_begins_is_refused_and_none_of_the_counts_is_off(
    serving: Serving,
) -> None:
    tokenizing, tokenized = asyncio.Event(), asyncio.Event()

    async def tokenize() -> None:
        tokenizing.set()
        await tokenized.wait()

    serving.engine.script = never_end("a")
    running = serving.generation.Generate(text_request())
    await running.read()
    serving.engine.acceptance = tokenize
    late = asyncio.ensure_future(read_all(serving.generation.Generate(text_request())))
    await tokenizing.wait()
    request = admin_pb2.DrainRequest()
    request.timeout.FromMilliseconds(50)
    draining = asyncio.ensure_future(serving.admin.Drain(request))
    await until(lambda: serving.live.is_draining)
    tokenized.set()
    _, error = await late
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(serving.engine.generations) == 1
    answer = await draining
    assert (answer.finished_generations, answer.aborted_generations) == (0, 1)


@pytest.mark.parametrize(("seconds", "nanos"), [(-1, 0), (1, -5), (10**13, 0), (0, 10**9)])
async def test_a_time_to_drain_that_is_none_is_refused_and_nothing_drains(
    serving: Serving, seconds: int, nanos: int
) -> None:
    request = admin_pb2.DrainRequest(timeout={"seconds": seconds, "nanos": nanos})
    error = await refused(serving.admin.Drain(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["timeout"]
    assert not serving.live.is_draining
