"""Bearer tokens over the wire: who is let in where, and that a refusal comes before the message is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, model_pb2
from service.access import Access
from service.offer import Offer
from service.tokens import followed_tokens
from tests.service.fake_engine import FakeEngine, never_end
from tests.service.harness import Serving, details_of, read_all, reason_of, serve, text_request

CODE = grpc.StatusCode
APPLICATION, OPERATOR = "application-token-of-a-team", "operator-token-of-the-house"
TOKENS = f"""
[team]
token = "{APPLICATION}"
[operator]
token = "{OPERATOR}"
permissions = ["admin"]
"""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write_token(path: Path, token: str) -> None:
    path.write_text(f'[team]\ntoken = "{token}"\n')


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    return path


@pytest.fixture
async def guarded(tokens_file: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    monkeypatch.setattr("service.reloading.LOOK_SECONDS", 0)
    async with serve(FakeEngine(), Offer(access=Access(followed_tokens(tokens_file)))) as running:
        yield running


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("nobody-knows-this-token"),
        bearer(""),
        bearer(APPLICATION + "x"),
        (("authorization", APPLICATION),),
        (("authorization", f"Basic {APPLICATION}"),),
        (*bearer(APPLICATION), *bearer(APPLICATION)),
        (("authorization-bin", APPLICATION.encode()),),
    ],
    ids=["none", "unknown", "empty", "longer", "no scheme", "other scheme", "twice", "binary"],
)
async def test_a_call_without_a_good_token_is_unauthenticated(guarded: Serving, metadata: Any) -> None:
    responses, error = await read_all(guarded.generation.Generate(text_request(), metadata=metadata))
    assert responses == []
    assert error is not None
    for failure in (error, await refusal(guarded.models.GetModel(model_pb2.GetModelRequest(), metadata=metadata))):
        assert failure.code() is CODE.UNAUTHENTICATED
        assert reason_of(failure) == "UNAUTHENTICATED"
        assert APPLICATION not in failure.details()
    assert guarded.engine.requests == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_good_token_is_let_in_under_its_name(guarded: Serving, scheme: str) -> None:
    metadata = (("authorization", f"{scheme} {APPLICATION}"),)
    _, error = await read_all(guarded.generation.Generate(text_request(), metadata=metadata))
    assert error is None
    assert [request.caller for request in guarded.engine.requests] == ["team"]


async def test_each_service_is_open_to_its_own_permission_alone(guarded: Serving) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(guarded.channel)
    denied = [
        (
            await refusal(admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=bearer(APPLICATION))),
            "AdminService",
            "admin",
        ),
        (
            await refusal(guarded.models.GetModel(model_pb2.GetModelRequest(), metadata=bearer(OPERATOR))),
            "ModelService",
            "application",
        ),
        (
            await refusal(
                guarded.generation.Complete(
                    generation_pb2.CompleteRequest(text={"text": "hi"}), metadata=bearer(OPERATOR)
                )
            ),
            "GenerationService",
            "application",
        ),
    ]
    for failure, service, permission in denied:
        assert failure.code() is CODE.PERMISSION_DENIED
        assert reason_of(failure) == "PERMISSION_DENIED"
        told = dict(details_of(failure)[error_details_pb2.ErrorInfo].metadata)
        assert told == {"service": f"mlxstream.v1.{service}", "permission": permission}


async def test_probes_need_no_token(guarded: Serving) -> None:
    health = health_pb2_grpc.HealthStub(guarded.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_large_message_of_a_stranger_is_not_read(guarded: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    monkeypatch.setattr("service.rpc._parse", lambda *arguments: parsed.append(arguments))
    _, error = await read_all(guarded.generation.Generate(text_request("x" * 10_000_000)))
    assert error is not None
    assert error.code() is CODE.UNAUTHENTICATED
    assert parsed == []


async def test_a_token_that_was_taken_back_is_refused_and_a_new_one_is_let_in(
    guarded: Serving, tokens_file: Path
) -> None:
    async def outcome(token: str) -> grpc.StatusCode:
        _, error = await read_all(guarded.generation.Generate(text_request(), metadata=bearer(token)))
        return CODE.OK if error is None else error.code()

    assert await outcome(APPLICATION) is CODE.OK
    write_token(tokens_file, "the-next-token-of-a-team")
    assert await outcome(APPLICATION) is CODE.UNAUTHENTICATED
    assert await outcome("the-next-token-of-a-team") is CODE.OK


async def test_a_token_that_is_taken_back_while_a_call_is_accepted_leaves_no_row_that_nobody_owns(
    guarded: Serving, tokens_file: Path
) -> None:
    async def tokenize() -> None:
        write_token(tokens_file, "the-next-token-of-a-team")

    guarded.engine.acceptance = tokenize
    guarded.engine.script = never_end("a")
    call = guarded.generation.Generate(text_request(), metadata=bearer(APPLICATION))
    await call.read()
    assert guarded.live.count == len(guarded.engine.generations) == 1
    call.cancel()
    await asyncio.wait_for(guarded.live.wait_idle(), 60)
    assert guarded.engine.live == {}


async def test_what_is_switched_off_is_no_method_of_this_server() -> None:
    async with serve(FakeEngine(), Offer(admin=False, reflection=False)) as running:
        failure = await refusal(admin_pb2_grpc.AdminServiceStub(running.channel).GetLoad(admin_pb2.GetLoadRequest()))
        assert failure.code() is CODE.UNIMPLEMENTED
        assert "no such method" in failure.details()
        reflect = running.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflect(iter([b""])).read()
        assert refused.value.code() is CODE.UNIMPLEMENTED
        unknown = await refusal(
            health_pb2_grpc.HealthStub(running.channel).Check(
                health_pb2.HealthCheckRequest(service="mlxstream.v1.AdminService")
            )
        )
        assert unknown.code() is CODE.NOT_FOUND
