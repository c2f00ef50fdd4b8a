"""A tool that has none of our files can list the services, learn the messages, and stream a generation."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from service.offer import Offer
from tests.service.harness import Serving, reason_of

VERSIONS = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]


async def ask(serving: Serving, version: str, **question: str) -> Any:
    call = serving.channel.stream_stream(
        f"/{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(**question)]))
    return await call.read()


async def learn(serving: Serving, version: str, symbol: str) -> descriptor_pool.DescriptorPool:
    """A pool that holds the file of `symbol` and all that it needs, learnt from the server alone."""
    files = {}
    answer = await ask(serving, version, file_containing_symbol=symbol)
    wanted = [FileDescriptorProto.FromString(one) for one in answer.file_descriptor_response.file_descriptor_proto]
    while wanted:
        file = wanted.pop()
        if file.name in files:
            continue
        files[file.name] = file
        for name in file.dependency:
            answer = await ask(serving, version, file_by_filename=name)
            found = answer.file_descriptor_response.file_descriptor_proto
            wanted += [FileDescriptorProto.FromString(one) for one in found]
    pool = descriptor_pool.DescriptorPool()
    remaining = dict(files)
    while remaining:
        ready = [file for file in remaining.values() if not set(file.dependency) & set(remaining)]
        for file in ready:
            pool.Add(file)
            del remaining[file.name]
    return pool


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_service_is_listed(serving: Serving, version: str) -> None:
    answer = await ask(serving, version, list_services="")
    names = {service.name for service in answer.list_services_response.service}
    assert names == {*Offer().service_names, "grpc.health.v1.Health", *(f"{one}.ServerReflection" for one in VERSIONS)}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_listed_service_can_be_described(serving: Serving, version: str) -> None:
    answer = await ask(serving, version, list_services="")
    for service in answer.list_services_response.service:
        pool = await learn(serving, version, service.name)
        assert pool.FindServiceByName(service.name).methods


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_generation_can_be_streamed_from_what_reflection_tells(serving: Serving, version: str) -> None:
    pool = await learn(serving, version, "mlxstream.v1.GenerationService")
    method = pool.FindServiceByName("mlxstream.v1.GenerationService").FindMethodByName("Generate")
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)
    call = serving.channel.unary_stream(
        "/mlxstream.v1.GenerationService/Generate",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )(json_format.ParseDict({"text": {"text": "hi"}, "options": {"maxTokens": 3}}, request_class()))
    events = [json_format.MessageToDict(response) async for response in call]
    assert "started" in events[0]
    assert events[-1]["finished"]["finishReason"] == "FINISH_REASON_STOP"
    assert "".join(event["chunk"]["text"] for event in events if "chunk" in event) == "Hello!"


async def test_a_method_is_a_symbol_too_as_ghz_asks(serving: Serving) -> None:
    method = "mlxstream.v1.GenerationService.Generate"
    answer = await ask(serving, "grpc.reflection.v1alpha", file_containing_symbol=method)
    found = answer.file_descriptor_response.file_descriptor_proto
    assert "mlxstream/v1/generation.proto" in [FileDescriptorProto.FromString(one).name for one in found]


@pytest.mark.parametrize("symbol", ["mlxstream.v1.Nothing", "mlxstream.v1.GenerationService.Nothing", ""])
async def test_an_unknown_symbol_is_not_found(serving: Serving, symbol: str) -> None:
    answer = await ask(serving, "grpc.reflection.v1", file_containing_symbol=symbol)
    assert answer.error_response.error_code == 5


@pytest.mark.parametrize("version", VERSIONS)
async def test_garbage_is_a_malformed_message_and_not_a_fault_of_ours(
    serving: Serving, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = serving.channel.stream_stream(f"/{version}.ServerReflection/ServerReflectionInfo")(iter([b"\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(failure.value) == "MALFORMED_MESSAGE"
    assert "ERROR" not in {record.levelname for record in caplog.records}
