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
