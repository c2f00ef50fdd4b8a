"""Every field of the options with every bad value that a client can send: refused by name, and the engine not asked."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from mlxstream.v1 import options_pb2
from tests.option_values import BAD, EDGES, EVERY_VALUE_IS_VALID
from tests.service.harness import Serving, read_all, text_request, violated_fields


def named(case: Any) -> str:
    return re.sub(r"(.{60}).*", r"\1…", str(case)) if not isinstance(case, str) else ""


def leaves(descriptor: Descriptor, path: str) -> list[str]:
    found = []
    for field in descriptor.fields:
        inner = field.message_type
        name = f"{path}.{field.name}"
        found += leaves(inner, name) if inner is not None and inner.fields else [name]
    return found


def test_the_table_holds_every_field() -> None:
    refused = {re.sub(r"\[\d+\]", "", path) for _, path in BAD}
    fields = set(leaves(options_pb2.GenerateOptions.DESCRIPTOR, "options"))
    assert len(fields) > 60
    assert fields - refused == EVERY_VALUE_IS_VALID


@pytest.mark.parametrize(("options", "path"), BAD, ids=named)
async def test_a_bad_value_is_refused_by_name_before_the_engine_is_asked(
    serving: Serving, options: dict[str, Any], path: str
) -> None:
    responses, error = await read_all(serving.generation.Generate(text_request(options=options)))
    assert responses == []
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [path]
    assert path in error.details()
    assert serving.engine.requests == []


@pytest.mark.parametrize("options", EDGES, ids=named)
async def test_a_value_at_the_edge_of_its_range_reaches_the_engine(serving: Serving, options: dict[str, Any]) -> None:
    _, error = await read_all(serving.generation.Generate(text_request(options=options)))
    assert error is None
    assert len(serving.engine.requests) == 1


async def test_the_first_bad_fields_are_named_and_the_rest_counted(serving: Serving) -> None:
    options = {"logit_bias": [{"token": 1}] * 1000, "max_tokens": 0}
    _, error = await read_all(serving.generation.Generate(text_request(options=options)))
    assert error is not None
    assert violated_fields(error)[:2] == ["options.max_tokens", "options.logit_bias[1].token"]
    assert error.details().endswith("and 992 more")
