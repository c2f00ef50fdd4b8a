"""Traces leave over OTLP: a collector in this process receives what a server was told to send it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from engine.contracts.errors import GenerationFailedError
from engine.contracts.results import FinishReason
from service.tracing import open_tracing
from tests.service.fake_engine import FakeGeneration
from tests.service.harness import Serving, read_all, text_request

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPAN_KIND_SERVER, STATUS_ERROR = 2, 2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the names are the service's
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def resources(self) -> list[Any]:
        return [one for request in self.requests for one in request.resource_spans]

    @property
    def spans(self) -> list[Any]:
        return [span for one in self.resources for scope in one.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def values_of(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        value = attribute.value
        kind = value.WhichOneof("value")
        found[attribute.key] = (
            [one.string_value for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
        )
    return found


async def generate(serving: Serving, endpoint: str, **call: Any) -> None:
    """One generation under tracing, which is then closed, as at the end of a process."""
    tracing = open_tracing(endpoint)
    serving.live.observe(tracing.ended)
    await read_all(
        serving.generation.Generate(
            text_request("a secret prompt", request_id="mine", **call.pop("fields", {})), **call
        )
    )
    await serving.live.wait_idle()
    tracing.close()


async def test_a_generation_arrives_with_its_stages_in_the_trace_of_its_caller(
    serving: Serving, collector: tuple[Collector, str]
) -> None:
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
    options = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 11}
    await generate(serving, collector[1], metadata=metadata, fields={"options": options})
    (resource,) = collector[0].resources
    assert values_of(resource.resource.attributes)["service.name"] == "mlx-stream"
    spans = {span.name: span for span in collector[0].spans}
    assert spans.keys() == {"text_completion tiny", "queue", "prefill", "decode"}
    whole = spans.pop("text_completion tiny")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex(), whole.trace_state) == (TRACE, PARENT, "vendor=1")
    assert whole.kind == SPAN_KIND_SERVER
    assert 0 < whole.start_time_unix_nano <= whole.end_time_unix_nano
    for stage in spans.values():
        assert (stage.trace_id, stage.parent_span_id) == (whole.trace_id, whole.span_id)
    found = values_of(whole.attributes)
    assert {key: value for key, value in found.items() if key.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "mlx-stream",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5.0,
        "gen_ai.request.seed": 11,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": serving.engine.generations[0].generation_id,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.0,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
    }
    assert found["mlx_stream.request_id"] == "mine"
    assert b"secret" not in b"".join(request.SerializeToString() for request in collector[0].requests)


async def test_a_failure_arrives_as_one_with_its_reason(serving: Serving, collector: tuple[Collector, str]) -> None:
    async def fail(generation: FakeGeneration) -> None:
        generation.start()
        generation.say("a")
        generation.end(FinishReason.ERROR, GenerationFailedError("c-1"))

    serving.engine.script = fail
    await generate(serving, collector[1])
    (whole,) = [span for span in collector[0].spans if not span.parent_span_id]
    assert (whole.status.code, whole.status.message) == (STATUS_ERROR, "GENERATION_FAILED")
    assert values_of(whole.attributes)["error.type"] == "GENERATION_FAILED"


async def test_what_the_caller_does_not_record_is_not_sent(serving: Serving, collector: tuple[Collector, str]) -> None:
    await generate(serving, collector[1], metadata=(("traceparent", f"00-{TRACE}-{PARENT}-00"),))
    assert collector[0].requests == []


async def test_a_seed_that_no_attribute_can_hold_is_left_out(
    serving: Serving, collector: tuple[Collector, str]
) -> None:
    await generate(serving, collector[1], fields={"options": {"seed": 2**64 - 1, "max_tokens": 3}})
    (whole,) = [span for span in collector[0].spans if not span.parent_span_id]
    found = values_of(whole.attributes)
    assert "gen_ai.request.seed" not in found
    assert found["gen_ai.request.max_tokens"] == 3
