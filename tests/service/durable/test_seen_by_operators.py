"""What operators see of durable generations: that nobody reads them, and how often going on works."""

from __future__ import annotations

from prometheus_client import generate_latest

from mlxstream.v1 import admin_pb2
from service.metrics import Metrics
from tests.service.durable.lives import Life, left_after, some
from tests.service.harness import read_all


async def phases(life: Life) -> list[int]:
    page = await life.serving.admin.ListGenerations(admin_pb2.ListGenerationsRequest())
    return [one.phase for one in page.generations]


async def test_a_generation_that_nobody_reads_is_listed_as_detached_until_it_is_read_again(life: Life) -> None:
    generation_id, before = await left_after(life, 4)
    assert await phases(life) == [admin_pb2.GENERATION_PHASE_DETACHED]
    call = life.resume(generation_id, before[-1].sequence)
    life.words.allow(5)
    await some(call, 1)
    assert await phases(life) == [admin_pb2.GENERATION_PHASE_DECODING]
    life.words.allow()
    await read_all(call)
    assert await phases(life) == []


async def test_calls_that_go_on_are_counted_by_whether_there_was_something_to_go_on_with(life: Life) -> None:
    generation_id, before = await left_after(life, 4)
    life.words.allow()
    await read_all(life.resume(generation_id, before[-1].sequence))
    await read_all(life.resume("0" * 32))
    metrics = life.serving.telemetry.metrics
    assert isinstance(metrics, Metrics)
    text = generate_latest(metrics.registry).decode()
    assert 'mlx_stream_resume_requests_total{outcome="hit"} 1.0' in text
    assert 'mlx_stream_resume_requests_total{outcome="miss"} 1.0' in text
