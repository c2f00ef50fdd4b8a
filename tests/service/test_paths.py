"""What the engine calls a field, a caller is told under its path in the schema."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from engine.contracts.errors import (
    ChatTemplateError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from mlxstream.v1 import generation_pb2, model_pb2
from service.paths import in_schema_terms, schema_path
from tests.service.harness import Serving, details_of, read_all, reason_of, text_request, violated_fields

TEXT = generation_pb2.GenerateRequest(text={"text": "hi"})
TOKENS = generation_pb2.CompleteRequest(tokens={"ids": [1]})
CHAT = generation_pb2.GenerateRequest(chat={})
RENDER = model_pb2.RenderChatRequest(chat={})
TOKENIZE = model_pb2.TokenizeRequest(text="hi")


@pytest.mark.parametrize(
    ("field", "request_message", "path"),
    [
        ("prompt.text", TEXT, "text.text"),
        ("prompt.text", TOKENIZE, "text"),
        ("prompt.tokens.ids[2]", TOKENS, "tokens.ids[2]"),
        ("prompt.chat.messages[0].role", CHAT, "chat.messages[0].role"),
        ("prompt.chat.template_variables.v", RENDER, "chat.template_variables.v"),
        ("prompt.chat", RENDER, "chat"),
        ("prompt", TEXT, "text.text"),
        ("prompt", TOKENS, "tokens.ids"),
        ("prompt", CHAT, "chat"),
        ("prompt", generation_pb2.GenerateRequest(), "prompt"),
        ("options.eos_token_ids[1]", TEXT, "options.eos_token_ids.ids[1]"),
        ("options.top_p", TEXT, "options.top_p"),
        ("ids[3]", model_pb2.DetokenizeRequest(), "ids[3]"),
    ],
)
def test_fields_are_called_as_the_request_has_them(field: str, request_message: Message, path: str) -> None:
    assert schema_path(field, request_message) == path
    assert schema_path(path, request_message) == path


@pytest.mark.parametrize(
    "constraint",
    [{"json_schema": "{}"}, {"json_object": {}}, {"regex": "a"}, {"grammar": "a"}, {"choice": {"choices": ["a"]}}],
    ids=lambda value: next(iter(value)),
)
async def test_a_constraint_is_refused_under_the_name_of_the_field_that_was_set(
    serving: Serving, constraint: dict[str, Any]
) -> None:
    serving.engine.refusal = UnsupportedOptionError("options.constraint", "not here")
    _, error = await read_all(serving.generation.Generate(text_request(options=constraint)))
    assert error is not None
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == f"options.{next(iter(constraint))} is not supported: not here"


async def test_the_status_and_its_details_name_the_same_path(serving: Serving) -> None:
    serving.engine.refusal = PromptTooLongError(prompt_tokens=200, context_length=128)
    _, error = await read_all(serving.generation.Generate(text_request()))
    assert error is not None
    assert violated_fields(error) == ["text.text"]
    assert error.details().startswith("text.text: 200 tokens")
    assert reason_of(error) == "PROMPT_TOO_LONG"
    (info,) = [one for one in details_of(error).values() if "metadata" in one.DESCRIPTOR.fields_by_name]
    assert dict(info.metadata) == {"prompt_tokens": "200", "context_length": "128"}


def test_a_renamed_error_keeps_its_class_and_its_fields_and_leaves_the_original_alone() -> None:
    error = PromptTooLongError(prompt_tokens=200, context_length=128)
    told = in_schema_terms(error, TOKENS)
    assert type(told) is PromptTooLongError
    assert (told.prompt_tokens, told.context_length) == (200, 128)
    assert (told.violations[0].field, error.violations[0].field) == ("tokens.ids", "prompt")
    assert in_schema_terms(told, TOKENS) is told
    assert str(in_schema_terms(ChatTemplateError("no"), CHAT)) == "chat: no"


def test_an_error_without_fields_is_told_as_it_is() -> None:
    for error in (EngineError("x"), InvalidRequestError.of("model", "x"), UnsupportedOptionError("options.hlg", "x")):
        assert in_schema_terms(error, TEXT) is error
