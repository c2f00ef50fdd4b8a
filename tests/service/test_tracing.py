"""Traces: one span a generation, within the caller's trace, by the conventions, and without a word of its text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service.stopping import StartError
from service.tracing import NoTracing, open_tracing
from service.tracing_spans import SpanTracing
from tests.service.fake_engine import never_end
from tests.service.harness import Serving, read_all, text_request

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def exporter(serving: Serving) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing = SpanTracing(SimpleSpanProcessor(exporter))
    serving.live.observe(tracing.ended)
    yield exporter
    tracing.close()


async def test_a_generation_is_a_span_of_the_callers_trace_with_its_stages(
    serving: Serving, exporter: InMemorySpanExporter
) -> None:
    metadata = (("traceparent", PARENT), ("tracestate", "vendor=1"))
    request = text_request("a secret prompt", request_id="mine")
    await read_all(serving.generation.Generate(request, metadata=metadata))
    await serving.live.wait_idle()
    *stages, span = exporter.get_finished_spans()
    assert span.name == "text_completion tiny"
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes is not None
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.usage.input_tokens"] == 5
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["mlx_stream.request_id"] == "mine"
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert {stage.parent.span_id for stage in stages if stage.parent} == {span.context.span_id}
    assert "secret" not in span.to_json()


async def test_a_chat_is_called_one_and_a_failure_is_marked(serving: Serving, exporter: InMemorySpanExporter) -> None:
    serving.engine.script = never_end("a")
    request = text_request()
    request.chat.messages.add(role="user", content=[{"text": "hi"}])
    call = serving.generation.Generate(request)
    await call.read()
    call.cancel()
    await serving.live.wait_idle()
    span = exporter.get_finished_spans()[-1]
    assert span.name == "chat tiny"
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "ABORTED"


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-0", "x" * 5000])
async def test_a_trace_that_is_none_begins_a_new_one(
    serving: Serving, exporter: InMemorySpanExporter, parent: str
) -> None:
    _, error = await read_all(serving.generation.Generate(text_request(), metadata=(("traceparent", parent),)))
    assert error is None
    await serving.live.wait_idle()
    span = exporter.get_finished_spans()[-1]
    assert span.parent is None


def test_nothing_is_traced_without_an_endpoint() -> None:
    assert isinstance(open_tracing(None), NoTracing)


def test_without_the_extra_an_endpoint_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> object:
        if name == "service.tracing_spans":
            raise ImportError(name)
        return real(name)

    monkeypatch.delitem(sys.modules, "service.tracing_spans", raising=False)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StartError, match=r"in the checkout: \.venv/bin/python -m pip install -e '\.\[otel\]'$"):
        open_tracing("http://127.0.0.1:4317")


def test_a_receiver_that_does_not_answer_holds_nobody_up() -> None:
    from service.tracing_spans import open_exporter

    tracing = open_exporter("http://127.0.0.1:9")
    tracing.close()
