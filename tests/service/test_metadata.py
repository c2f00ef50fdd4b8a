"""Priority travels in metadata, where proxies see it, and is checked like any field."""

from __future__ import annotations

import grpc
import pytest

from mlxstream.v1 import generation_pb2
from tests.service.harness import Serving, read_all, text_request


def asking(priority: str) -> tuple[tuple[str, str], ...]:
    return (("mlx-stream-priority", priority),)


@pytest.mark.parametrize(("text", "priority"), [("0", 0), ("7", 7), ("-100", -100), ("100", 100)])
async def test_the_priority_of_a_call_reaches_the_engine(serving: Serving, text: str, priority: int) -> None:
    await read_all(serving.generation.Generate(text_request(), metadata=asking(text)))
    await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}), metadata=asking(text))
    assert [generation.request.priority for generation in serving.engine.generations] == [priority, priority]


async def test_without_metadata_the_priority_is_zero(serving: Serving) -> None:
    await read_all(serving.generation.Generate(text_request()))
    assert serving.engine.generations[0].request.priority == 0


@pytest.mark.parametrize("text", ["", "high", "1.5", "101", "-101", "99999999999", "--1", "+1", "0x1"])
async def test_a_priority_that_is_no_number_in_range_is_refused_by_name(serving: Serving, text: str) -> None:
    _, error = await read_all(serving.generation.Generate(text_request(), metadata=asking(text)))
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "metadata[mlx-stream-priority]" in (error.details() or "")
    assert serving.engine.generations == []


def session(key: str) -> tuple[tuple[str, str], ...]:
    return (("mlx-stream-session", key),)


async def test_the_session_by_which_balancers_route_is_the_one_whose_state_is_kept(serving: Serving) -> None:
    await read_all(serving.generation.Generate(text_request(), metadata=session("s1")))
    await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}), metadata=session("s2"))
    await read_all(serving.generation.Generate(text_request()))
    sessions = [generation.request.options.cache_session_id for generation in serving.engine.generations]
    assert sessions == ["s1", "s2", None]


async def test_a_session_in_the_request_goes_before_the_one_in_metadata(serving: Serving) -> None:
    request = text_request(options={"cache_session_id": "mine"})
    await read_all(serving.generation.Generate(request, metadata=session("theirs")))
    assert serving.engine.generations[0].request.options.cache_session_id == "mine"


async def test_a_session_that_is_too_long_is_refused_by_name(serving: Serving) -> None:
    _, error = await read_all(serving.generation.Generate(text_request(), metadata=session("x" * 257)))
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "mlx-stream-session" in (error.details() or "") or "cache_session_id" in (error.details() or "")
    assert serving.engine.generations == []
