"""Health that follows the engine: `grpc.health.v1` for the process ("") and for each service by its full name.

"" is liveness: the loop answers, and no step of the engine is stuck. A name is readiness: a service that needs one has
a warm model, and takes new work. Draining ends readiness and leaves liveness, so that nobody kills a process that
finishes its streams. Watchers are told of every change that lasts, and their streams end by our word: left to the
server's end, each would be cut off like a call that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, cast

from grpc_health.v1 import health_pb2

from engine.contracts.errors import NotFoundError, UnavailableError
from engine.execution.engine import EngineState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from engine.execution.engine import Engine
    from service.rpc import Context, Handler

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5
HEALTH_SERVICE: Final = cast("ServiceDescriptor", health_pb2.DESCRIPTOR.services_by_name["Health"])
# Names that need no model: liveness, and the service that brings one in.
OF_THE_PROCESS: Final = ("", "mlxstream.v1.AdminService")
_RESPONSE: Final = health_pb2.HealthCheckResponse


class Health:
    """What probes are told. Everything is NOT_SERVING until `report` says otherwise."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """Answers for the process and for `service_names`; those of operators are as the process is."""
        self._names = ("", *service_names)
        self._serving = False
        self._alive = False
        self._draining = False
        self._closed = False
        self._ended = asyncio.Event()
        self._news = asyncio.Event()

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC."""
        return {"Check": self.check, "List": self.list_all, "Watch": self.watch}

    def report(self, *, serving: bool, alive: bool | None = None) -> None:
        """Tell probes and watchers, if it is news. `alive` is of the process; by default it is as services are."""
        alive = serving if alive is None else alive
        state = (serving and not (self._closed or self._draining), alive and not self._closed)
        if state == (self._serving, self._alive):
            return
        self._serving, self._alive = state
        logger.info("health", extra={"fields": {"serving": self._serving, "alive": self._alive}})
        self._wake_watchers()

    def drain(self) -> None:
        """Services are NOT_SERVING for good; the process stays alive."""
        self._draining = True
        self.report(serving=False, alive=self._alive)

    def close(self) -> None:
        """NOT_SERVING for good."""
        self._closed = True
        self.report(serving=False)

    def end_watches(self) -> None:
        """End every watcher's stream, and refuse new ones. Call last: watchers come back at once while they can."""
        self.close()
        self._ended.set()
        self._wake_watchers()

    @property
    def has_ended(self) -> bool:
        """Whether streams that last as long as the server must end."""
        return self._ended.is_set()

    async def wait_ended(self, timeout_seconds: float) -> None:
        """Return when such streams must end, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()

    async def check(self, request: health_pb2.HealthCheckRequest, _context: Context) -> health_pb2.HealthCheckResponse:
        """How one service is."""
        if request.service not in self._names:
            raise NotFoundError("service", request.service)
        return self._status(request.service)

    async def list_all(self, _request: Message, _context: Context) -> Message:
        """How every service is."""
        statuses = {name: self._status(name) for name in self._names}
        response: Message = health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]
        return response

    async def watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """How one service is, again whenever that changes; what has changed back before it was sent is skipped."""
        told = None
        while True:
            news, status = self._news, self._status(request.service)
            if status != told:
                await context.write(status)
                told = status
            elif self.has_ended:
                raise UnavailableError("stopped", "the service is shutting down")
            else:
                await news.wait()

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        if name not in self._names:
            return _RESPONSE(status=_RESPONSE.SERVICE_UNKNOWN)
        good = self._alive if name in OF_THE_PROCESS else self._serving
        return _RESPONSE(status=_RESPONSE.SERVING if good else _RESPONSE.NOT_SERVING)

    def _wake_watchers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def follow_engine(engine: Engine, health: Health, *, stall_seconds: float) -> None:
    """Report the truth until the engine has died: its step in hand is younger than `stall_seconds`, a model is there.

    A stuck step is told `POLL_SECONDS` after that age at the latest, the engine's death at once.
    """
    failed = asyncio.ensure_future(engine.wait_failed())
    try:
        while not failed.done():
            alive = engine.state is EngineState.READY and engine.stalled_seconds() < stall_seconds
            health.report(serving=alive and engine.can_serve, alive=alive)
            await asyncio.wait({failed}, timeout=POLL_SECONDS)
        health.report(serving=False)
    finally:
        failed.cancel()
