"""What a scrape finds: every name that dashboards use, and numbers that agree with what was done."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.contracts.errors import OverloadedError
from engine.contracts.events import GenerationFinished
from engine.contracts.load import STEP_TOKEN_EDGES, EngineLoad
from engine.contracts.results import DenoisingStats, FinishReason, GenerateStats
from mlxstream.v1 import admin_pb2, generation_pb2, model_pb2
from service import pulse
from service.access import Access
from service.address import Address
from service.durable.generations import DurableGenerations
from service.live import CallFacts
from service.measures import Measures
from service.metrics import FIRST_TOKEN_EDGES, REQUEST_EDGES, TOKEN_EDGES, Metrics
from service.offer import Offer
from service.server import build_server
from service.telemetry import Telemetry
from service.tokens import TokenTable
from tests.service.fake_engine import FakeEngine, never_end
from tests.service.harness import Serving, read_all, serve, text_request
from tests.service.test_health import READING
from tests.waiting import until


def samples(metrics: Measures) -> dict[str, float]:
    """Values by "name" or "name{label=value}"; buckets by their edge."""
    assert isinstance(metrics, Metrics)
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def telemetry(serving: Serving) -> Telemetry:
    """What the running server's ends are told to, beside its own."""
    telemetry = Telemetry(serving.engine, metrics=Metrics(serving.engine))
    serving.live.observe(telemetry.ended)
    return telemetry


async def test_an_end_is_counted_with_its_reason_and_times(serving: Serving, telemetry: Telemetry) -> None:
    await read_all(serving.generation.Generate(text_request()))
    await serving.live.wait_idle()
    found = samples(telemetry.metrics)
    assert found["mlx_stream_request_success_total{finished_reason=stop}"] == 1
    assert found["mlx_stream_request_generation_tokens_sum"] == 3
    assert found["mlx_stream_request_prompt_tokens_sum"] == 5
    assert found["mlx_stream_request_queue_time_seconds_sum"] == pytest.approx(0.0015)
    for name in ("time_to_first_token", "e2e_request_latency", "request_prefill_time", "request_decode_time"):
        assert found[f"mlx_stream_{name}_seconds_count"] == 1
    assert found["mlx_stream_cancel_to_free_seconds_count"] == 0


async def test_passes_for_each_token_are_told_of_generations_that_denoise(
    serving: Serving, telemetry: Telemetry
) -> None:
    finished = GenerationFinished(
        finish_reason=FinishReason.STOP,
        stats=GenerateStats(generated_tokens=8, denoising=DenoisingStats(steps=4, blocks=1, canvas_tokens=8)),
    )
    await read_all(serving.generation.Generate(text_request()))
    telemetry.ended(serving.engine.generations[0], finished, CallFacts())
    found = samples(telemetry.metrics)
    assert found["mlx_stream_denoising_steps_per_token_count"] == 1
    assert found["mlx_stream_denoising_steps_per_token_sum"] == 0.5


async def test_a_cancelled_generation_tells_how_long_it_took_to_free_its_row(
    serving: Serving, telemetry: Telemetry
) -> None:
    serving.engine.script = never_end("a")
    call = serving.generation.Generate(text_request())
    await call.read()
    call.cancel()
    await serving.live.wait_idle()
    found = samples(telemetry.metrics)
    assert found["mlx_stream_request_success_total{finished_reason=cancelled}"] == 1
    assert found["mlx_stream_cancel_to_free_seconds_count"] == 1
    assert 0 <= found["mlx_stream_cancel_to_free_seconds_sum"] < 5


async def test_the_engines_numbers_are_read_at_the_scrape() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    classes = [0] * (len(STEP_TOKEN_EDGES) + 1)
    classes[1], classes[-1] = 2, 1
    engine.busy = EngineLoad(
        running=3, queued=4, row_limit=8, state_bytes=1, state_limit_bytes=4, steps=3, step_tokens=tuple(classes),
        packed_tokens=20_016, prefilled_tokens=90, generated_tokens=70, step_age_seconds=0.5,
    )  # fmt: skip
    found = samples(metrics)
    assert found["mlx_stream_num_requests_running"] == 3
    assert found["mlx_stream_num_requests_waiting"] == 4
    assert found["mlx_stream_kv_cache_usage_perc"] == 0.25
    assert found["mlx_stream_prompt_tokens_total"] == 90
    assert found["mlx_stream_generation_tokens_total"] == 70
    assert found["mlx_stream_step_age_seconds"] == 0.5
    assert found["mlx_stream_iteration_tokens_total_bucket{le=1.0}"] == 0
    assert found["mlx_stream_iteration_tokens_total_bucket{le=8.0}"] == 2
    assert found["mlx_stream_iteration_tokens_total_bucket{le=+Inf}"] == 3
    assert found["mlx_stream_iteration_tokens_total_sum"] == 20_016


def test_memory_is_told_with_the_bound_of_a_device_that_has_one() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    assert "mlx_stream_memory_bytes" not in samples(metrics)
    engine.reading = READING
    found = samples(metrics)
    assert (found["mlx_stream_memory_bytes"], found["mlx_stream_free_memory_bytes"]) == (5000, 1 << 40)
    assert "mlx_stream_memory_limit_bytes" not in found
    engine.reading = dataclasses.replace(READING, active_limit_bytes=6000)
    assert samples(metrics)["mlx_stream_memory_limit_bytes"] == 6000


async def test_a_scrape_is_answered_while_no_model_is_there_and_after_the_engine_has_died() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)
    assert "mlx_stream_model_weights_bytes" in samples(metrics)
    engine.fail()
    found = samples(metrics)
    assert "mlx_stream_model_weights_bytes" not in found
    assert found["mlx_stream_num_requests_running"] == 0


def test_edges_are_those_that_dashboards_of_other_servers_expect() -> None:
    assert (FIRST_TOKEN_EDGES[0], FIRST_TOKEN_EDGES[-1], len(FIRST_TOKEN_EDGES)) == (0.001, 2560.0, 22)
    assert (TOKEN_EDGES[0], TOKEN_EDGES[-1], len(TOKEN_EDGES)) == (0.01, 80.0, 19)
    assert (REQUEST_EDGES[0], REQUEST_EDGES[-1], len(REQUEST_EDGES)) == (0.3, 7680.0, 21)
    assert (1, 8, *(2**power for power in range(4, 15))) == STEP_TOKEN_EDGES


async def test_refusals_calls_and_messages_are_counted() -> None:
    from mlxstream.v1 import generation_pb2_grpc
    from service.health import Health
    from service.live import LiveGenerations
    from service.server import bind

    engine = FakeEngine()
    telemetry, live, health = (
        Telemetry(engine, metrics=Metrics(engine)),
        LiveGenerations(),
        Health(Offer().service_names),
    )
    durable = DurableGenerations(engine, live, grace_seconds=60.0)
    server = build_server(engine, live, health, durable, Offer(), telemetry)
    address = bind(server, Address(host="127.0.0.1", port=0))
    await server.start()
    async with grpc.aio.insecure_channel(str(address)) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await read_all(stub.Generate(text_request()))
        engine.refusal = OverloadedError("the queue", limit=1, used=1, retry_after_seconds=1.0)
        await read_all(stub.Generate(text_request()))
    await server.stop(None)
    found = samples(telemetry.metrics)
    assert found["mlx_stream_admission_rejections_total{reason=OVERLOADED}"] == 1
    method = "method=mlxstream.v1.GenerationService/Generate"
    assert found[f"mlx_stream_grpc_server_calls_total{{code=OK,{method}}}"] == 1
    assert found[f"mlx_stream_grpc_server_calls_total{{code=RESOURCE_EXHAUSTED,{method}}}"] == 1
    assert found[f"mlx_stream_grpc_server_call_duration_seconds_count{{{method}}}"] == 2
    assert found["mlx_stream_message_tokens_sum"] == 3


CALLS = "mlx_stream_grpc_server_calls_total{{code={},method=mlxstream.v1.{}}}"


async def test_calls_that_never_reach_a_handler_are_counted_and_only_generations_count_as_generations() -> None:
    offer = Offer(access=Access(lambda: TokenTable(())))
    async with serve(FakeEngine(), offer) as running:
        await read_all(running.generation.Generate(text_request()))
        with pytest.raises(grpc.aio.AioRpcError):
            await running.models.GetModel(model_pb2.GetModelRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await running.admin.GetLoad(admin_pb2.GetLoadRequest())
        found = samples(running.telemetry.metrics)
    for method in ("GenerationService/Generate", "ModelService/GetModel", "AdminService/GetLoad"):
        assert found[CALLS.format("UNAUTHENTICATED", method)] == 1
    assert found["mlx_stream_admission_rejections_total{reason=UNAUTHENTICATED}"] == 1


async def test_refusals_count_whatever_part_of_a_request_they_are_for(serving: Serving) -> None:
    refused: list[grpc.aio.AioRpcError | None] = []
    for fields in ({"delivery": {"max_delay": {"seconds": -1}}}, {"options": {"temperature": -1.0}}):
        refused.append((await read_all(serving.generation.Generate(text_request(**fields))))[1])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.generation.Complete(
            generation_pb2.CompleteRequest(text={"text": "hi"}, delivery={"max_tokens_per_message": 1})
        )
    assert {one.code() for one in (*refused, failure.value) if one is not None} == {grpc.StatusCode.INVALID_ARGUMENT}
    found = samples(serving.telemetry.metrics)
    assert found["mlx_stream_admission_rejections_total{reason=INVALID_REQUEST}"] == 3


async def test_malformed_requests_and_missed_deadlines_are_counted_as_what_they_are(serving: Serving) -> None:
    raw = serving.channel.unary_stream("/mlxstream.v1.GenerationService/Generate", request_serializer=bytes)
    await read_all(raw(b"\xff\xff"))
    serving.engine.script = never_end("a")
    await read_all(serving.generation.Generate(text_request(), timeout=1.0))
    missed = CALLS.format("DEADLINE_EXCEEDED", "GenerationService/Generate")
    await until(lambda: samples(serving.telemetry.metrics).get(missed))
    found = samples(serving.telemetry.metrics)
    assert found[CALLS.format("INVALID_ARGUMENT", "GenerationService/Generate")] == 1
    assert found[missed] == 1
    assert CALLS.format("CANCELLED", "GenerationService/Generate") not in found


async def test_prompts_that_bypass_the_cache_are_not_counted_as_looked_up(serving: Serving) -> None:
    await read_all(serving.generation.Generate(text_request(options={"cache": {"bypass": True}})))
    await serving.live.wait_idle()
    assert samples(serving.telemetry.metrics)["mlx_stream_prefix_cache_queries_total"] == 0
    await read_all(serving.generation.Generate(text_request()))
    await serving.live.wait_idle()
    assert samples(serving.telemetry.metrics)["mlx_stream_prefix_cache_queries_total"] == 5


async def test_a_late_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.01)
    telemetry = Telemetry(FakeEngine(), metrics=Metrics(FakeEngine()))
    task = asyncio.ensure_future(pulse.beat(telemetry.meter, telemetry.metrics))
    await until(lambda: samples(telemetry.metrics)["mlx_stream_event_loop_lag_seconds_count"] >= 3)
    task.cancel()
    found = samples(telemetry.metrics)
    assert found["mlx_stream_event_loop_lag_seconds_count"] >= 3
    assert found["mlx_stream_event_loop_tasks"] >= 2
