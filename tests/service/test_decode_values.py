"""Requests that are too much are refused by name and number, before anything is built from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from engine.contracts.errors import MAX_VIOLATIONS, InvalidRequestError
from mlxstream.v1 import generation_pb2, model_pb2, options_pb2, prompt_pb2
from service import decode_options
from service.decode import MAX_PARTS, MAX_STRUCTS_BYTES, decode_chat, decode_generation
from service.decode_values import MAX_ELEMENTS
from tests.service.harness import Serving, violated_fields

REQUESTS = (generation_pb2.GenerateRequest, model_pb2.RenderChatRequest, model_pb2.DetokenizeRequest)
USER = {"role": "user"}


def repeated_fields(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
        if field.is_repeated:
            yield field.full_name
        if field.message_type is not None and field.message_type.file.package == "mlxstream.v1":
            yield from repeated_fields(field.message_type)


def test_every_list_of_a_request_has_a_bound() -> None:
    found = {name for request in REQUESTS for name in repeated_fields(request.DESCRIPTOR)}
    assert len(found) > 10
    assert found == set(MAX_ELEMENTS)


def refusal(request: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as failure:
        decode_generation(request, caller="")
    return failure.value


def with_options(**options: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text={"text": "hi"}, options=options_pb2.GenerateOptions(**options))


def with_chat(**chat: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(chat=prompt_pb2.ChatPrompt(**chat))


@pytest.mark.parametrize(
    ("build", "path", "limit"),
    [
        (lambda n: with_options(stop_sequences=[""] * n), "options.stop_sequences", 64),
        (lambda n: with_options(eos_token_ids={"ids": [1] * n}), "options.eos_token_ids.ids", 1024),
        (lambda n: with_options(logit_bias=[{}] * n), "options.logit_bias", 65_536),
        (lambda n: with_options(choice={"choices": ["x"] * n}), "options.choice.choices", 1024),
        (lambda n: with_options(adapters=[{}] * n), "options.adapters", 64),
        (lambda n: with_chat(messages=[{}] * n), "chat.messages", 16_384),
        (lambda n: with_chat(messages=[USER], tools=[{}] * n), "chat.tools", 1024),
        (lambda n: with_chat(messages=[USER, {**USER, "content": [{}] * n}]), "chat.messages[1].content", 1024),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_element_too_many_is_one_violation_with_both_numbers(build: Any, path: str, limit: int) -> None:
    (violation,) = refusal(build(limit + 1)).violations
    assert violation.field == path
    assert violation.description == f"at most {limit} are allowed, got {limit + 1}"


def test_the_parts_of_a_conversation_are_bounded_together() -> None:
    messages = [{**USER, "content": [{"text": "x"}] * 1024}] * (MAX_PARTS // 1024)
    assert len(decode_chat(prompt_pb2.ChatPrompt(messages=messages)).messages) == len(messages)
    messages.append({**USER, "content": [{"text": "x"}]})
    (violation,) = refusal(with_chat(messages=messages)).violations
    assert violation.field == "chat.messages"
    assert str(MAX_PARTS) in violation.description


@pytest.mark.parametrize("field", ["tools", "template_variables"])
def test_the_bytes_of_json_values_are_bounded(field: str) -> None:
    request = with_chat(messages=[USER])
    struct = request.chat.tools.add() if field == "tools" else request.chat.template_variables
    struct.update({"key": "x" * MAX_STRUCTS_BYTES})
    (violation,) = refusal(request).violations
    assert violation.field == f"chat.{field}"
    assert str(MAX_STRUCTS_BYTES) in violation.description


def test_a_list_that_is_refused_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_options, "GenerateOptions", None)
    assert len(refusal(with_options(stop_sequences=[""] * 100_000)).violations) == 1


async def test_no_error_lists_more_than_a_few_violations_and_the_rest_is_counted(serving: Serving) -> None:
    request = generation_pb2.CompleteRequest(text={"text": "hi"}, options={"stop_sequences": [""] * 60})
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.generation.Complete(request)
    assert violated_fields(failure.value) == [f"options.stop_sequences[{index}]" for index in range(MAX_VIOLATIONS)]
    assert failure.value.details().endswith("; and 52 more")


async def test_more_ids_to_detokenize_than_any_text_has_are_refused_with_both_numbers(serving: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.models.Detokenize(model_pb2.DetokenizeRequest(ids=[1] * 1_048_577))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.details() == "ids: at most 1048576 are allowed, got 1048577"


@pytest.mark.parametrize(
    ("field", "data", "path"),
    [("options", b"\x80\x06\x01", "options"), ("delivery", b"\xe8\x04\x01", "delivery")],
)
async def test_a_field_that_this_server_does_not_know_is_refused_by_its_number(
    serving: Serving, field: str, data: bytes, path: str
) -> None:
    request = generation_pb2.GenerateRequest(text={"text": "hi"})
    getattr(request, field).MergeFromString(data)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await serving.generation.Generate(request).read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(refusal.value) == [path]
    assert "is not known to this server" in (refusal.value.details() or "")
