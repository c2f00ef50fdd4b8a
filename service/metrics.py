"""What Prometheus scrapes: vLLM's meanings and bucket edges under our prefix, so that its dashboards translate by name.

Gauges and counters of the engine are read at the scrape; what happens to single generations is observed as it happens.
No label holds a name that a caller has chosen. Source of edges: vLLM's `v1/metrics/loggers`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from engine.contracts.results import FinishReason
from service.metrics_engine import PREFIX, EngineCollector
from service.metrics_readiness import ReadinessCollector

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Engine, Generation
    from service.live import CallFacts
    from service.readiness import NotReady

FIRST_TOKEN_EDGES: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_EDGES: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_EDGES: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
COUNT_EDGES: Final = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
MESSAGE_EDGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEP_EDGES: Final = (0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
SHORT_EDGES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The registry of one server. Observed on the loop; scraped from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Count from zero."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_EDGES
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between deliveries of one stream's tokens.", TOKEN_EDGES
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_EDGES
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_EDGES)
        self._queue = self._histogram("request_queue_time_seconds", "In the queue.", REQUEST_EDGES)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", REQUEST_EDGES
        )
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token.", REQUEST_EDGES)
        self._inference = self._histogram("request_inference_time_seconds", "Prefill and decode.", REQUEST_EDGES)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of prompts.", COUNT_EDGES)
        self._generated_tokens = self._histogram("request_generation_tokens", "Tokens of completions.", COUNT_EDGES)
        self._ends = self._counter("request_success", "Generations that ended, by finish reason.", ["finished_reason"])
        self._refusals = self._counter("admission_rejections", "Generations that were refused, by reason.", ["reason"])
        self._queried = self._counter("prefix_cache_queries", "Prompt tokens that were looked up among kept prefixes.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens that kept prefixes have spared.")
        self._cancel_to_free = self._histogram(
            "cancel_to_free_seconds", "From an abort signal to the row's end.", SHORT_EDGES
        )
        self._message_tokens = self._histogram("message_tokens", "Tokens that share one message.", MESSAGE_EDGES)
        self._loop_lag = self._histogram("event_loop_lag_seconds", "How late the event loop's timers are.", SHORT_EDGES)
        self._steps_per_token = self._histogram(
            "denoising_steps_per_token", "Passes of a denoising generation for each token delivered.", STEP_EDGES
        )
        self._loop_tasks = Gauge(PREFIX + "event_loop_tasks", "Tasks of the event loop.", registry=self.registry)
        self._resumes = self._counter("resume_requests", "Calls that asked to go on, by outcome.", ["outcome"])
        self._calls = self._counter("grpc_server_calls", "Calls that ended.", ["method", "code"])
        self._call_seconds = self._histogram(
            "grpc_server_call_duration_seconds", "Whole calls.", REQUEST_EDGES, ["method"]
        )

    def show_readiness(self, not_ready: Callable[[], NotReady | None]) -> None:
        """Tell at each scrape why no new work is wanted; None: it is."""
        self.registry.register(ReadinessCollector(not_ready))

    def ended(self, generation: Generation, finished: GenerationFinished, facts: CallFacts) -> None:
        """A generation has ended."""
        stats, reason = finished.stats, finished.finish_reason
        self._ends.labels(reason.value).inc()
        self._whole.observe(max(0.0, time.time() - generation.arrived_at))
        self._queue.observe(stats.queue_ms / 1000)
        self._prompt_tokens.observe(stats.prompt_tokens)
        self._generated_tokens.observe(stats.generated_tokens)
        if generation.aborted_at is not None and reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            self._cancel_to_free.observe(max(0.0, time.perf_counter() - generation.aborted_at))
        if stats.generated_tokens:
            if facts.looks_up_prefixes:
                self._queried.inc(stats.prompt_tokens)
            self._hits.inc(stats.cached_tokens)
            self._first_token.observe(stats.time_to_first_token_ms / 1000)
            self._prefill.observe(stats.prefill_ms / 1000)
            self._decode.observe(stats.decode_ms / 1000)
            self._inference.observe((stats.prefill_ms + stats.decode_ms) / 1000)
            if stats.denoising is not None:
                self._steps_per_token.observe(stats.denoising.steps / stats.generated_tokens)
        if stats.generated_tokens > 1:
            self._per_token.observe(stats.decode_ms / 1000 / (stats.generated_tokens - 1))

    def refused(self, reason: str) -> None:
        """A generation was refused for `reason`, one of our error reasons."""
        self._refusals.labels(reason).inc()

    def sent(self, tokens: int) -> None:
        """A message with so many tokens was sent."""
        self._message_tokens.observe(tokens)

    def waited_for_tokens(self, seconds: float) -> None:
        """A stream's tokens came so long after those before."""
        self._between_tokens.observe(seconds)

    def looked_at_loop(self, *, late_seconds: float, tasks: int) -> None:
        """A timer of the loop was so late, and the loop has so many tasks."""
        self._loop_lag.observe(late_seconds)
        self._loop_tasks.set(tasks)

    def resumed(self, *, hit: bool) -> None:
        """A call asked to go on with a generation; `hit`: it was there."""
        self._resumes.labels("hit" if hit else "miss").inc()

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call of `method`, "package.Service/Method", has ended with `code`."""
        self._calls.labels(method, code).inc()
        self._call_seconds.labels(method).observe(seconds)

    def _histogram(self, name: str, text: str, edges: tuple[float, ...], labels: list[str] | None = None) -> Histogram:
        return Histogram(PREFIX + name, text, labels or (), buckets=edges, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(PREFIX + name, text, labels or (), registry=self.registry)
