"""Load reports for balancers (ORCA): with every answer of a generation, and as a stream of their own.

`application_utilization` is the larger of two shares: rows wanted of the rows there are, and memory promised to rows.
It passes 1 when generations wait. Named metrics carry the parts under the names that inference gateways know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import UnavailableError
from service.decode_values import NANOS_PER_SECOND, nanoseconds, refuse_bad_values
from service.orca_schema import OrcaSchema

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from engine.contracts.load import EngineLoad
    from engine.execution.engine import Engine
    from service.health import Health
    from service.load_meter import LoadMeter, Rates
    from service.rpc import Context, Handler

TRAILER: Final = "endpoint-load-metrics-bin"
SHORTEST_INTERVAL_SECONDS: Final = 1.0
DEFAULT_INTERVAL_SECONDS: Final = 10.0


class LoadReports:
    """Makes reports of one engine's load, and answers `xds.service.orca.v3.OpenRcaService`."""

    def __init__(self, engine: Engine, meter: LoadMeter, health: Health) -> None:
        """Read `engine` and `meter`; streams end with `health`."""
        self._engine = engine
        self._meter = meter
        self._health = health
        self._schema = OrcaSchema()

    @property
    def service(self) -> ServiceDescriptor:
        """The service that streams reports."""
        return self._schema.service

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC."""
        return {"StreamCoreMetrics": self.stream}

    def trailer(self) -> tuple[str, bytes]:
        """The report as trailing metadata of one call."""
        return TRAILER, self._report().SerializeToString()

    async def stream(self, request: Any, context: Context) -> None:
        """Send a report now, and again after every interval, until the server ends."""
        refuse_bad_values(request.report_interval, "report_interval")
        asked = nanoseconds(request.report_interval) / NANOS_PER_SECOND
        interval = max(SHORTEST_INTERVAL_SECONDS, asked) if asked > 0 else DEFAULT_INTERVAL_SECONDS
        while not self._health.has_ended:
            await context.write(self._report())
            await self._health.wait_ended(interval)
        raise UnavailableError("stopped", "the service is shutting down")

    def _report(self) -> Message:
        return self._schema.report(**report_fields(self._engine.load(), self._meter.rates()))


def report_fields(load: EngineLoad, rates: Rates) -> dict[str, Any]:
    """What a report says of `load`. Pure."""
    wanted_share = (load.running + load.queued) / load.row_limit if load.row_limit else 0.0
    return {
        "application_utilization": max(wanted_share, load.state_share),
        "mem_utilization": load.state_share,
        "rps_fractional": rates.ended_per_second,
        "eps": rates.failed_per_second,
        "utilization": {"kv_cache": load.state_share},
        "named_metrics": {
            "kv_cache_usage_perc": load.state_share,
            "num_requests_running": float(load.running),
            "num_requests_waiting": float(load.queued),
        },
    }
