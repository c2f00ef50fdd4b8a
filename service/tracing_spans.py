"""OpenTelemetry spans of generations, by the conventions for generative AI. Needs the extra `otel`.

A generation becomes one span when it ends, with its real times: it joins the trace that the caller's metadata names,
and has its stay in the queue, its prefill and its decoding as children. No span holds a prompt or an output.
Source: OpenTelemetry semantic conventions, `gen_ai.*`; W3C Trace Context.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Generation
    from service.live import CallFacts

PROVIDER: Final = "mlx-stream"
CLOSE_SECONDS: Final = 0.5


def open_exporter(endpoint: str) -> SpanTracing:
    """Send spans to the OTLP receiver at `endpoint`; "http://" means without encryption."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return SpanTracing(BatchSpanProcessor(exporter))


class SpanTracing:
    """Makes spans and hands them to a processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Spans of one server go to `processor`."""
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: PROVIDER}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(PROVIDER)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, generation: Generation, finished: GenerationFinished, facts: CallFacts) -> None:
        """Make the span of a generation, and its children."""
        began = round(1e9 * generation.arrived_at)
        span = self._tracer.start_span(
            f"{facts.operation} {generation.model}",
            context=self._propagator.extract(dict(facts.trace)),
            kind=SpanKind.SERVER,
            start_time=began,
            attributes=attributes_of(generation, finished, facts),
        )
        if finished.error is not None:
            span.set_status(Status(StatusCode.ERROR, finished.error.reason))
        self._add_stages(span, finished, began)
        span.end(max(began, time.time_ns()))

    def close(self) -> None:
        """Send what is left, for a moment: a receiver that does not answer holds nobody up."""
        closing = threading.Thread(target=self._provider.shutdown, name="trace-export-end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _add_stages(self, parent: Span, finished: GenerationFinished, began: int) -> None:
        stats, context = finished.stats, set_span_in_context(parent)
        stages = [("queue", stats.queue_ms)]
        if stats.generated_tokens:
            stages += [("prefill", stats.prefill_ms), ("decode", stats.decode_ms)]
        for name, milliseconds in stages:
            child = self._tracer.start_span(name, context=context, kind=SpanKind.INTERNAL, start_time=began)
            began += round(1e6 * milliseconds)
            child.end(began)


def attributes_of(
    generation: Generation, finished: GenerationFinished, facts: CallFacts
) -> dict[str, str | int | float | list[str]]:
    """What a span says of a generation. Pure."""
    stats = finished.stats
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": facts.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.id": generation.generation_id,
        "gen_ai.response.finish_reasons": [finished.finish_reason.value],
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.generated_tokens,
        "mlx_stream.request_id": generation.request_id,
        "mlx_stream.cached_tokens": stats.cached_tokens,
    }
    for name, value in facts.options.items():
        attributes[f"gen_ai.request.{name}"] = float(value) if name == "top_k" else value  # a float by the conventions
    if stats.generated_tokens:
        attributes["gen_ai.response.time_to_first_chunk"] = stats.time_to_first_token_ms / 1000
    if finished.error is not None:
        attributes["error.type"] = finished.error.reason
    return attributes
