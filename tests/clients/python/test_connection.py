"""Who is reached and how: several targets, tokens, TLS, health that is watched, and what is tried again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

import mlxstream
from mlxstream.connection import checked_targets, checked_token, joined, service_config
from mlxstream.v1.generation_pb2 import GenerateRequest
from tests.clients.python.scripted_server import (
    READINESS_SERVICE,
    Context,
    Events,
    ScriptedServer,
    ThreadedServer,
    answer,
    serving,
)
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving(answer("Hello")) as running:
        yield running


@pytest.fixture
def threaded_server() -> Iterator[ThreadedServer]:
    with contextlib.closing(ThreadedServer(answer("Hello"))) as running:
        yield running


def test_several_addresses_make_one_target() -> None:
    assert joined(["10.0.0.1:50051", "10.0.0.2:50051"]) == "ipv4:10.0.0.1:50051,10.0.0.2:50051"
    assert joined(["[::1]:1", "[::1]:2"]) == "ipv6:[::1]:1,[::1]:2"


@pytest.mark.parametrize("targets", [[], ["10.0.0.1:1", "[::1]:1"], ["10.0.0.1"]])
def test_addresses_that_cannot_be_joined_are_refused(targets: list[str]) -> None:
    with pytest.raises(ValueError, match="target"):
        checked_targets(targets)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ä"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        checked_token(token)


def test_balancing_asks_for_health_and_turns() -> None:
    config = service_config(balanced=True)
    assert config["healthCheckConfig"] == {"serviceName": READINESS_SERVICE}
    assert "round_robin" in config["loadBalancingConfig"][0]
    assert "healthCheckConfig" not in service_config(balanced=False)


async def test_a_token_goes_with_every_call(server: ScriptedServer) -> None:
    async with mlxstream.AsyncClient(server.target, token="secret") as client:
        await client.generate("hi")
    assert server.generations.metadata[-1]["authorization"] == "Bearer secret"


async def test_two_servers_take_turns() -> None:
    async with (
        serving(answer("a")) as first,
        serving(answer("b")) as second,
        mlxstream.AsyncClient([first.target, second.target]) as client,
    ):
        texts: set[str] = set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while texts != {"a", "b"}:  # each takes its turns as soon as it is known to serve
                texts.add((await client.generate("hi")).text)


async def test_a_server_that_does_not_serve_is_passed_over() -> None:
    async with serving(answer("a")) as first, serving(answer("b")) as second:
        await first.health.set(READINESS_SERVICE, HealthCheckResponse.NOT_SERVING)
        async with mlxstream.AsyncClient([first.target, second.target]) as client:
            texts = [(await client.generate("hi")).text for _ in range(6)]
    assert set(texts) == {"b"}


async def test_health_is_watched_until_the_loop_is_left(server: ScriptedServer) -> None:
    seen = []
    async with mlxstream.AsyncClient(server.target) as client:
        async for status in client.watch_health():
            seen.append(status)
            if len(seen) == 1:
                await server.health.set(READINESS_SERVICE, HealthCheckResponse.NOT_SERVING)
            else:
                break
    assert seen == ["SERVING", "NOT_SERVING"]


def test_a_plain_thread_can_watch_too(threaded_server: ThreadedServer) -> None:
    with mlxstream.Client(threaded_server.scripted.target) as client:
        assert next(client.watch_health()) == "SERVING"


@pytest.mark.parametrize(("pushback", "attempts"), [("20", 4), ("-1", 1)])
async def test_a_full_server_is_tried_again_when_it_says_when(
    server: ScriptedServer, pushback: str, attempts: int
) -> None:
    async def full(_request: GenerateRequest, context: Context) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("grpc-retry-pushback-ms", pushback),))

    server.generations.behaviour = full
    async with mlxstream.AsyncClient(server.target) as client:
        with pytest.raises(mlxstream.OverloadedError):
            await anext(aiter(client.stream("hi")))
    assert len(server.generations.requests) == attempts


async def test_a_failure_after_the_first_event_is_not_tried_again(server: ScriptedServer) -> None:
    async def begin_and_fail(_request: GenerateRequest, context: Context) -> None:
        await Events(context).start()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    server.generations.behaviour = begin_and_fail
    async with mlxstream.AsyncClient(server.target) as client:
        with pytest.raises(mlxstream.UnavailableError):
            [_ async for _ in client.stream("hi")]
    assert len(server.generations.requests) == 1


def test_certificates_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"pem")
    tls = mlxstream.Tls.from_files(ca=tmp_path / "ca.pem", server_name="mlx.example")
    assert (tls.ca, tls.certificate, tls.key, tls.server_name) == (b"pem", None, None, "mlx.example")
