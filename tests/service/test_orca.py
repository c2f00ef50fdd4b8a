"""Load reports reach balancers with answers and as a stream, in the messages that they know."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from engine.contracts.load import EngineLoad
from mlxstream.v1 import generation_pb2_grpc
from service import orca
from service.load_meter import Rates
from service.orca import TRAILER, report_fields
from service.orca_schema import OrcaSchema
from tests.service.harness import Serving, read_all, text_request

SCHEMA = OrcaSchema()
BUSY = EngineLoad(running=2, queued=4, row_limit=4, state_bytes=1, state_limit_bytes=2)


def report_of(serialized: bytes) -> Any:
    report = SCHEMA.report()
    report.ParseFromString(serialized)
    return report


def stream(serving: Serving, seconds: float = 1.0) -> Any:
    method = SCHEMA.service.methods_by_name["StreamCoreMetrics"]
    call = serving.channel.unary_stream(f"/{SCHEMA.service.full_name}/{method.name}")
    interval = int(seconds)
    return call(bytes([0x0A, 2, 0x08, interval]) if interval else b"")


def test_the_messages_are_on_the_wire_what_balancers_read() -> None:
    assert SCHEMA.service.full_name == "xds.service.orca.v3.OpenRcaService"
    report = SCHEMA.report(application_utilization=1.0, named_metrics={"a": 2.0})
    assert report.SerializeToString(deterministic=True) == (
        b"B\x0c\n\x01a\x11\x00\x00\x00\x00\x00\x00\x00@" + b"I\x00\x00\x00\x00\x00\x00\xf0?"
    )


def test_utilization_passes_one_while_generations_wait() -> None:
    fields = report_fields(BUSY, Rates(ended_per_second=3.0, failed_per_second=0.5))
    assert fields["application_utilization"] == 1.5
    assert fields["mem_utilization"] == 0.5
    assert (fields["rps_fractional"], fields["eps"]) == (3.0, 0.5)
    assert fields["named_metrics"]["num_requests_waiting"] == 4.0
    assert report_fields(EngineLoad(), Rates())["application_utilization"] == 0.0


async def test_an_answer_carries_the_load_in_its_trailers(serving: Serving) -> None:
    """Clients of gRPC hand this trailer to their balancer alone, so it is looked for on the wire."""
    serving.engine.busy = BUSY
    wire = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(serving.address.host, serving.address.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: bytearray) -> None:
            while block := await source.read(65536):
                seen += block
                sink.write(block)

        await asyncio.gather(pump(reader, far_writer, bytearray()), pump(far_reader, writer, wire))

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        _, error = await read_all(stub.Generate(text_request()))
    proxy.close()
    assert error is None
    assert TRAILER.encode() in wire
    share = SCHEMA.report(application_utilization=1.5).SerializeToString()
    assert share in wire


async def test_a_stream_of_reports_begins_at_once_and_goes_on(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orca, "SHORTEST_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(orca, "DEFAULT_INTERVAL_SECONDS", 0.01)
    call = stream(serving, 0)
    assert report_of(await call.read()).application_utilization == 0
    serving.engine.busy = BUSY
    while report_of(await asyncio.wait_for(call.read(), 60)).application_utilization != 1.5:
        pass
    call.cancel()


async def test_streams_of_reports_end_by_our_word(serving: Serving) -> None:
    call = stream(serving, 100)
    await call.read()
    serving.health.end_watches()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await asyncio.wait_for(call.read(), 60)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
