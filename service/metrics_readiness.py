"""Whether new work is wanted and why not, read when somebody scrapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.metrics_engine import PREFIX
from service.readiness import NotReady

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric


class ReadinessCollector(Collector):
    """One gauge for the whole, and one for each reason: 1 where it holds, else 0."""

    def __init__(self, not_ready: Callable[[], NotReady | None]) -> None:
        """Read from `not_ready`, on the scraper's thread."""
        self._not_ready = not_ready

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known from the first scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Both as they are now."""
        found = self._not_ready()
        yield GaugeMetricFamily(PREFIX + "ready", "1 while new work is wanted.", value=float(found is None))
        reasons = GaugeMetricFamily(PREFIX + "not_ready", "1 for the reason why it is not.", labels=["reason"])
        for reason in NotReady:
            reasons.add_metric([reason.value], float(reason is found))
        yield reasons
