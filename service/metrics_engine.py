"""The engine's own gauges and counters, read when somebody scrapes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from engine.contracts.errors import EngineError
from engine.contracts.load import STEP_TOKEN_EDGES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from engine.contracts.load import EngineLoad
    from engine.contracts.memory import MemoryReading
    from engine.contracts.model import ModelInfo
    from engine.execution.engine import Engine

PREFIX: Final = "mlx_stream_"


class EngineCollector(Collector):
    """Reads `Engine.load` and the model's facts; called on the scraper's thread."""

    def __init__(self, engine: Engine) -> None:
        """Read from `engine`."""
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known from the first scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now."""
        load = self._engine.load()
        yield from _gauges(load)
        yield from _counters(load)
        yield _step_tokens(load)
        yield from _memory(self._engine.memory())
        model = self._model()
        if model is not None:
            yield _model_gauge("model_weights_bytes", "Bytes of the resident weights.", model.weights_bytes)
            yield _model_gauge("adapters_mounted", "Adapters that requests may select.", len(model.adapters))
            yield _cache_config(model)

    def _model(self) -> ModelInfo | None:
        try:
            return self._engine.model
        except EngineError:
            return None


def _gauges(load: EngineLoad) -> Iterable[Metric]:
    for name, text, value in (
        ("num_requests_running", "Generations that hold a row.", load.running),
        ("num_requests_waiting", "Generations that wait for a row.", load.queued),
        ("num_requests_limit", "Most generations that may hold a row.", load.row_limit),
        ("queue_limit", "Most generations that may wait.", load.queue_limit),
        ("kv_cache_usage_perc", "Memory promised to rows, of what they may be promised; 1 is all.", load.state_share),
        ("kv_cache_bytes", "Memory promised to rows.", load.state_bytes),
        ("kv_cache_limit_bytes", "Memory that rows may be promised.", load.state_limit_bytes),
        ("prefix_cache_entries", "Kept prefixes in memory.", load.prefix_entries),
        ("prefix_cache_bytes", "Memory of kept prefixes.", load.prefix_bytes),
        ("prefix_cache_limit_bytes", "Memory that kept prefixes may take.", load.prefix_limit_bytes),
        ("step_age_seconds", "How long the step in hand has taken; 0 when idle.", load.step_age_seconds),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=value)


def _memory(reading: MemoryReading | None) -> Iterable[Metric]:
    if reading is not None:
        yield _model_gauge("memory_bytes", "Memory that mlx holds.", reading.active_bytes)
        yield _model_gauge("free_memory_bytes", "Memory of the machine that is left.", reading.free_bytes)
        if reading.active_limit_bytes is not None:
            limit_bytes = reading.active_limit_bytes
            yield _model_gauge("memory_limit_bytes", "Memory that mlx should hold at most on its device.", limit_bytes)


def _counters(load: EngineLoad) -> Iterable[Metric]:
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens that were computed.", load.prefilled_tokens),
        ("generation_tokens", "Tokens that were generated.", load.generated_tokens),
        ("engine_steps", "Steps of the engine.", load.steps),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value=value)


def _step_tokens(load: EngineLoad) -> Metric:
    cumulative = list(itertools.accumulate(load.step_tokens))
    edges = [*(f"{edge:.1f}" for edge in STEP_TOKEN_EDGES), "+Inf"]
    return HistogramMetricFamily(
        f"{PREFIX}iteration_tokens_total",
        "Tokens that share one step.",
        buckets=list(zip(edges, map(float, cumulative), strict=True)),
        sum_value=load.packed_tokens,
    )


def _model_gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _cache_config(model: ModelInfo) -> Metric:
    facts = {
        "kv_storage": model.composition.kv_store_key,
        "max_rows": str(model.composition.max_rows),
        "device": model.runtime.device,
        "compute_dtype": model.composition.compute_dtype,
    }
    return InfoMetricFamily(f"{PREFIX}cache_config", "How keys and values are kept.", value=facts)
