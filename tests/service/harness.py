"""A server on a free loopback port, over the scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from mlxstream.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2_grpc
from service.address import Address
from service.durable.generations import DurableGenerations
from service.health import Health
from service.listening import ListenAddress
from service.live import LiveGenerations
from service.metrics import Metrics
from service.offer import Offer
from service.server import bind, build_server
from service.telemetry import Telemetry
from service.tls import Tls
from tests.service.fake_engine import FakeEngine

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass
class Serving:
    """A running server and a channel to it."""

    engine: FakeEngine
    live: LiveGenerations
    health: Health
    server: grpc.aio.Server
    address: ListenAddress
    channel: grpc.aio.Channel
    durable: DurableGenerations
    telemetry: Telemetry

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def models(self) -> Any:
        return model_pb2_grpc.ModelServiceStub(self.channel)


@contextlib.asynccontextmanager
async def serve(
    engine: FakeEngine,
    offer: Offer | None = None,
    *,
    at: ListenAddress | None = None,
    tls: Tls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    grace_seconds: float = 60.0,
) -> AsyncIterator[Serving]:
    offer = offer or Offer()
    live, health = LiveGenerations(), Health(offer.service_names)
    durable = DurableGenerations(engine, live, grace_seconds=grace_seconds)
    telemetry = Telemetry(engine, metrics=Metrics(engine))
    server = build_server(engine, live, health, durable, offer, telemetry)
    address = bind(server, at or Address(host="127.0.0.1", port=0), tls)
    await server.start()
    async with open_channel(address, credentials) as channel:
        try:
            yield Serving(engine, live, health, server, address, channel, durable, telemetry)
        finally:
            await engine.stop()
            await live.wait_idle()
            durable.close()
            health.end_watches()
            await server.stop(None)
            address.release()


def open_channel(address: ListenAddress, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    if credentials is None:
        return grpc.aio.insecure_channel(str(address), options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(str(address), credentials, options=CLIENT_OPTIONS)


def text_request(text: str = "hi", **fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text={"text": text}, **fields)


async def read_all(call: Any) -> tuple[list[generation_pb2.GenerateResponse], grpc.aio.AioRpcError | None]:
    """Everything that a stream carries, and the error that it ends with."""
    responses = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        return responses, error
    return responses, None


def details_of(error: grpc.aio.AioRpcError) -> dict[type[Message], Message]:
    """The google.rpc details of an error, by type; checks that the status inside repeats the one outside."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    found: dict[type[Message], Message] = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                packed.Unpack(found[kind])
    assert len(found) == len(status.details)
    return found


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = details_of(error)[error_details_pb2.ErrorInfo]
    assert info.domain == "mlxstream.v1"
    return info.reason


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    return [violation.field for violation in details_of(error)[error_details_pb2.BadRequest].field_violations]
