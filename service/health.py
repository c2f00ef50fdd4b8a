"""Health that follows the engine: `grpc.health.v1` for the process ("") and for each service by its full name."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.execution.engine import EngineState

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from engine.execution.engine import Engine

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5


class Health:
    """What probes are told. Everything is NOT_SERVING until `report` says otherwise."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """Answers for the process and for `service_names`."""
        self._names = ("", *service_names)
        self._servicer = health.aio.HealthServicer()
        self._serving = False

    async def attach(self, server: grpc.aio.Server) -> None:
        """Answer on `server`. Call before the server starts: the library's servicer begins as SERVING."""
        await self._set(serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def report(self, *, serving: bool) -> None:
        """Tell probes and watchers, if it is news."""
        if serving != self._serving:
            logger.info("health", extra={"fields": {"serving": serving}})
            await self._set(serving=serving)

    async def close(self) -> None:
        """NOT_SERVING for good."""
        await self.report(serving=False)
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, *, serving: bool) -> None:
        self._serving = serving
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, response.SERVING if serving else response.NOT_SERVING)


async def follow_engine(engine: Engine, health: Health, *, stall_seconds: float) -> None:
    """Report the truth until the engine has died: it is ready, and its step in hand is younger than `stall_seconds`."""
    failed = asyncio.ensure_future(engine.wait_failed())
    try:
        while not failed.done():
            alive = engine.state is EngineState.READY and engine.stalled_seconds() < stall_seconds
            await health.report(serving=alive)
            await asyncio.wait({failed}, timeout=POLL_SECONDS)
        await health.report(serving=False)
    finally:
        failed.cancel()
