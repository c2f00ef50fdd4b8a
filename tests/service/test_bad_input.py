"""What no well-behaved client sends: each gets its documented status, and the server keeps serving."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from mlxstream.v1 import generation_pb2
from service.limits import MAX_MESSAGE_BYTES
from tests.service.harness import Serving, details_of, read_all, reason_of, text_request, violated_fields

CODE = grpc.StatusCode
GENERATE = "/mlxstream.v1.GenerationService/Generate"
NOT_UTF8 = {"surrogate": b"\xed\xa0\x80", "stray": b"\xff\xfe", "overlong": b"\xc0\x80"}


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field, written by hand (payloads below 128 bytes)."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def wide_field(number: int, payload: bytes) -> bytes:
    """The same for numbers from 16 on."""
    tag = number << 3 | 2
    return bytes([tag & 0x7F | 0x80, tag >> 7, len(payload)]) + payload


PLACES = {
    "prompt text": lambda bad: field(3, field(1, bad)),
    "request id": lambda bad: field(1, bad) + field(3, field(1, b"hi")),
    "model": lambda bad: field(2, bad) + field(3, field(1, b"hi")),
    "role": lambda bad: field(5, field(1, field(1, bad))),
    "message text": lambda bad: field(5, field(1, field(1, b"user") + field(2, field(1, bad)))),
    "tool name": lambda bad: field(5, field(2, field(1, field(1, bad)))),
    "stop sequence": lambda bad: field(3, field(1, b"hi")) + field(6, field(3, bad)),
    "adapter": lambda bad: field(3, field(1, b"hi")) + field(6, wide_field(60, field(1, bad))),
    "schema": lambda bad: field(3, field(1, b"hi")) + field(6, wide_field(70, bad)),
}


async def still_serves(serving: Serving) -> bool:
    responses, error = await read_all(serving.generation.Generate(text_request()))
    return error is None and responses[-1].WhichOneof("event") == "finished"


async def refusal_of(serving: Serving, request: Any, **call: Any) -> grpc.aio.AioRpcError:
    """The error of Generate, which must come before anything else."""
    responses, error = await read_all(serving.generation.Generate(request, **call))
    assert responses == []
    assert error is not None
    return error


def assert_malformed(error: grpc.aio.AioRpcError, message: str) -> None:
    """The refusal of bytes that are no `message`, which names no field, since none was read."""
    assert error.code() is CODE.INVALID_ARGUMENT
    assert reason_of(error) == "MALFORMED_MESSAGE"
    details = details_of(error)
    assert set(details) == {error_details_pb2.ErrorInfo}
    assert details[error_details_pb2.ErrorInfo].metadata["message_name"] == message
    assert "every string must be UTF-8" in error.details()
    assert "Decode" not in error.details()


def nested(levels: int) -> generation_pb2.GenerateRequest:
    """A request whose one tool holds a list in a list, and so on."""
    request = generation_pb2.GenerateRequest(chat={"messages": [{"role": "user"}]})
    value = request.chat.tools.add().fields["k"]
    for _ in range(levels):
        value = value.list_value.values.add()
    value.bool_value = True
    return request


async def test_values_that_are_nested_too_deeply_are_told_so(serving: Serving) -> None:
    _, error = await read_all(serving.generation.Generate(nested(20)))
    assert error is None
    error = await refusal_of(serving, nested(60))
    assert_malformed(error, "mlxstream.v1.GenerateRequest")
    assert "nested too deeply" in error.details()


@pytest.mark.parametrize("bad", NOT_UTF8.values(), ids=NOT_UTF8.keys())
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_bytes_that_are_not_utf8_are_an_invalid_argument(serving: Serving, place: Any, bad: bytes) -> None:
    call = serving.channel.unary_stream(GENERATE)(place(bad))
    responses, error = await read_all(call)
    assert responses == []
    assert error is not None
    assert error.code() is CODE.INVALID_ARGUMENT
    assert_malformed(error, "mlxstream.v1.GenerateRequest")
    assert serving.engine.requests == []
    assert await still_serves(serving)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_the_hand_written_bytes_are_fine_with_good_text(place: Any) -> None:
    generation_pb2.GenerateRequest.FromString(place(b"ok\x00"))


async def test_random_bytes_are_an_invalid_argument(serving: Serving) -> None:
    call = serving.channel.unary_unary("/mlxstream.v1.GenerationService/Complete")(b"\x07\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    assert failure.value.code() is CODE.INVALID_ARGUMENT
    assert await still_serves(serving)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    ("options", "path"),
    [
        (lambda x: {"temperature": x}, "options.temperature"),
        (lambda x: {"top_p": x}, "options.top_p"),
        (lambda x: {"min_p": x}, "options.min_p"),
        (lambda x: {"xtc_probability": x}, "options.xtc_probability"),
        (lambda x: {"xtc_threshold": x}, "options.xtc_threshold"),
        (lambda x: {"repetition_penalty": x}, "options.repetition_penalty"),
        (lambda x: {"presence_penalty": x}, "options.presence_penalty"),
        (lambda x: {"frequency_penalty": x}, "options.frequency_penalty"),
        (lambda x: {"logit_bias": [{"token": 1, "bias": 0}, {"token": 2, "bias": x}]}, "options.logit_bias[1].bias"),
        (lambda x: {"adapters": [{"id": "a", "scale": x}]}, "options.adapters[0].scale"),
        (lambda x: {"curve": [{"x_percent": x}]}, "options.curve[0].x_percent"),
        (lambda x: {"hlg": {"parametric": {"gain": x}}}, "options.hlg.parametric.gain"),
        (lambda x: {"denoising": {"t_max": x}}, "options.denoising.t_max"),
    ],
)
async def test_numbers_that_are_not_finite_are_refused_by_name(
    serving: Serving, value: float, options: Any, path: str
) -> None:
    error = await refusal_of(serving, text_request(options=options(value)))
    assert error.code() is CODE.INVALID_ARGUMENT
    assert violated_fields(error) == [path]
    assert serving.engine.requests == []


async def test_a_number_in_a_tool_must_be_json(serving: Serving) -> None:
    request = generation_pb2.GenerateRequest(chat={"messages": [{"role": "user"}]})
    request.chat.tools.add().update({"parameters": {"limits": [1, math.nan]}})
    error = await refusal_of(serving, request)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert violated_fields(error) == ["chat.tools[0].parameters.limits[1]"]


@pytest.mark.parametrize(
    ("request_message", "path"),
    [
        (generation_pb2.GenerateRequest(), "prompt"),
        (generation_pb2.GenerateRequest(chat={}), "chat.messages"),
        (generation_pb2.GenerateRequest(chat={"messages": [{}]}), "chat.messages[0].role"),
        (
            generation_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": [{}]}]}),
            "chat.messages[0].content[0]",
        ),
        (text_request(model="x" * 257), "model"),
        (text_request(options={"hlg": {}}), "options.hlg"),
        (text_request(options={"max_tokens": 0}), "options.max_tokens"),
        (text_request(delivery={"max_tokens_per_message": 0}), "delivery.max_tokens_per_message"),
        (text_request(delivery={"max_delay": {"seconds": 61}}), "delivery.max_delay"),
        (text_request(delivery={"max_delay": {"nanos": -1}}), "delivery.max_delay"),
        (text_request(delivery={"max_delay": {"seconds": 1, "nanos": -1}}), "delivery.max_delay"),
        (text_request(delivery={"max_delay": {"nanos": 10**9}}), "delivery.max_delay"),
        (text_request(delivery={"heartbeat_interval": {"seconds": 2**60}}), "delivery.heartbeat_interval"),
        (text_request(delivery={"heartbeat_interval": {"nanos": 1}}), "delivery.heartbeat_interval"),
        (text_request(delivery={"heartbeat_interval": {"seconds": -5}}), "delivery.heartbeat_interval"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_field_that_is_missing_or_out_of_range_is_named(
    serving: Serving, request_message: generation_pb2.GenerateRequest, path: str
) -> None:
    error = await refusal_of(serving, request_message)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert violated_fields(error) == [path]
    assert serving.engine.requests == []


@pytest.mark.parametrize(
    ("field", "duration", "told"),
    [
        ("max_delay", {"seconds": 60, "nanos": 1}, "must be from 0 to 60 s, got 60.000000001 s"),
        ("max_delay", {"nanos": -1}, "must be from 0 to 60 s, got -0.000000001 s"),
        ("max_delay", {"seconds": -2, "nanos": -500_000_000}, "must be from 0 to 60 s, got -2.5 s"),
        (
            "heartbeat_interval",
            {"seconds": 3600, "nanos": 1000},
            "must be 0 or from 0.01 to 3600 s, got 3600.000001 s",
        ),
        ("heartbeat_interval", {"nanos": 9_999_999}, "must be 0 or from 0.01 to 3600 s, got 0.009999999 s"),
        ("heartbeat_interval", {"seconds": 1, "nanos": -1}, "seconds and nanos must have the same sign, got 1 and -1"),
        ("heartbeat_interval", {"nanos": -(10**9)}, "nanos must be within ±999999999, got -1000000000"),
    ],
)
async def test_a_duration_is_refused_with_all_its_digits(
    serving: Serving, field: str, duration: dict[str, int], told: str
) -> None:
    error = await refusal_of(serving, text_request(delivery={field: duration}))
    assert error.details() == f"delivery.{field}: {told}"


async def test_complete_refuses_options_that_pace_a_stream(serving: Serving) -> None:
    delivery = {
        "max_tokens_per_message": 1,
        "max_delay": {"seconds": 1},
        "heartbeat_interval": {"seconds": 1},
        "draft_blocks": True,
    }
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}, delivery=delivery))
    assert failure.value.code() is CODE.INVALID_ARGUMENT
    assert set(violated_fields(failure.value)) == {f"delivery.{name}" for name in delivery}


@pytest.mark.parametrize("number", [4, 99, -1, 2**31 - 1])
@pytest.mark.parametrize(
    ("request_of", "path", "enum"),
    [
        (lambda x: {"delivery": {"deadline_policy": x}}, "delivery.deadline_policy", "DeadlinePolicy"),
        (lambda x: {"options": {"denoising": {"sampler": x}}}, "options.denoising.sampler", "DenoisingSampler"),
        (lambda x: {"options": {"fill": x}}, "options.fill", "FillMode"),
        (
            lambda x: {"options": {"hlg": {"parametric": {"pivot": x}}}},
            "options.hlg.parametric.pivot",
            "HlgPivot",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_value_that_only_a_newer_client_knows_is_refused_by_name(
    serving: Serving, request_of: Any, path: str, enum: str, number: int
) -> None:
    error = await refusal_of(serving, text_request(**request_of(number)))
    assert error.code() is CODE.INVALID_ARGUMENT
    assert violated_fields(error) == [path]
    assert f"{number} is no value of {enum} that this server knows" in error.details()
    assert serving.engine.requests == []


async def test_a_prompt_of_several_megabytes_is_taken(serving: Serving) -> None:
    for megabytes in (3.9, 4.1):
        text = "x" * int(megabytes * 1024 * 1024)
        _, error = await read_all(serving.generation.Generate(text_request(text)))
        assert error is None
        assert serving.engine.requests[-1].prompt.text == text


async def test_a_message_over_the_limit_is_resource_exhausted_with_the_number(serving: Serving) -> None:
    error = await refusal_of(serving, text_request("x" * MAX_MESSAGE_BYTES))
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in error.details()
    assert serving.engine.requests == []
    assert await still_serves(serving)


async def test_as_many_messages_as_are_allowed_are_taken(serving: Serving) -> None:
    message = {"role": "user", "content": [{"text": "x"}] * 4}
    request = generation_pb2.GenerateRequest(chat={"messages": [message] * 16_384})
    _, error = await read_all(serving.generation.Generate(request))
    assert error is None
    assert len(serving.engine.requests[0].prompt.messages) == 16_384


async def test_a_stop_sequence_of_a_megabyte_is_refused_with_the_limit(serving: Serving) -> None:
    error = await refusal_of(serving, text_request(options={"stop_sequences": ["x" * 1_000_000]}))
    assert error.code() is CODE.INVALID_ARGUMENT
    assert violated_fields(error) == ["options.stop_sequences[0]"]
    assert "4096" in error.details()


async def test_large_metadata_is_refused_and_the_server_goes_on(serving: Serving) -> None:
    error = await refusal_of(serving, text_request(), metadata=(("x-large", "x" * 100_000),))
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert await still_serves(serving)


@pytest.mark.parametrize("method", ["mlxstream.v1.GenerationService/No", "some.Other/Call", "grpc.health.v1.Health/X"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_method_that_nobody_has_is_unimplemented_by_name(serving: Serving, method: str, kind: str) -> None:
    multi = getattr(serving.channel, kind)(f"/{method}")
    call = multi(iter([b"x"])) if kind.startswith("stream") else multi(b"x")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await (call.read() if kind.endswith("stream") else call)
    assert failure.value.code() is CODE.UNIMPLEMENTED
    assert reason_of(failure.value) == "UNSUPPORTED_OPTION"
    assert failure.value.details() == f"{method.replace('/', '.')} is not supported: this server has no such method"
