"""Traces of generations. Nothing is traced unless an endpoint is given, and then OpenTelemetry must be installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol

from service.stopping import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Generation
    from mlxstream.v1 import options_pb2
    from service.decode import GenerationMessage
    from service.live import CallFacts
    from service.rpc import Context

TRACE_KEYS: Final = ("traceparent", "tracestate")
INSTALL: Final = ".venv/bin/python -m pip install -e '.[otel]'"
LONGEST_TRACE_VALUE: Final = 512
# Options that the conventions for generative AI have attributes for.
TRACED_OPTIONS: Final = (
    "max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
)  # fmt: skip
LARGEST_ATTRIBUTE: Final = 2**63 - 1


class Tracing(Protocol):
    """Whoever takes the account of a generation for its trace."""

    def ended(self, generation: Generation, finished: GenerationFinished, facts: CallFacts, /) -> None:
        """A generation has ended."""

    def close(self) -> None:
        """Send what is left, for a moment."""


class NoTracing:
    """Traces nothing."""

    def ended(self, *_: object) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is left."""


def open_tracing(endpoint: str | None) -> Tracing:
    """Tracing to the OTLP receiver at `endpoint`, such as "http://127.0.0.1:4317"; None traces nothing.

    Raises:
        StartError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NoTracing()
    try:
        spans = importlib.import_module("service.tracing_spans")
    except ImportError:
        raise StartError(f"--otlp-endpoint: needs OpenTelemetry; in the checkout: {INSTALL}") from None
    tracing: Tracing = spans.open_exporter(endpoint)
    return tracing


def trace_of(context: Context) -> Mapping[str, str]:
    """The W3C headers of the caller's trace, as far as they can be any; what is longer is ignored."""
    return {
        key: value
        for key, value in context.invocation_metadata() or ()
        if key in TRACE_KEYS and isinstance(value, str) and len(value) <= LONGEST_TRACE_VALUE
    }


def operation_of(request: GenerationMessage) -> str:
    """What the conventions call a request of this kind."""
    return "chat" if request.HasField("chat") else "text_completion"


def traced_options(options: options_pb2.GenerateOptions) -> Mapping[str, float]:
    """The options that were set, as far as the conventions name them and an attribute can hold them."""
    found = {name: getattr(options, name) for name in TRACED_OPTIONS if options.HasField(name)}
    return {name: value for name, value in found.items() if value <= LARGEST_ATTRIBUTE}
