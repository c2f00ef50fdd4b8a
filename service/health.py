"""Health that follows the engine: `grpc.health.v1` for the process ("") and for each service by its full name.

"" is liveness: the loop answers, and no step of the engine is stuck. A name is readiness: a service that needs one has
a warm model, and takes new work. Draining ends readiness and leaves liveness, so that nobody kills a process that
finishes its streams. Watchers are told of every change, however short, and their streams end by our word: left to the
server's end, each would be cut off like a call that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, cast

from grpc_health.v1 import health_pb2

from engine.contracts.errors import NotFoundError, UnavailableError
from engine.execution.engine import EngineState
from service.readiness import MemoryWatch, NotReady

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
# What ends liveness too: a restart would help.
OF_A_DEAD_PROCESS: Final = frozenset({NotReady.LOADING, NotReady.STALLED, NotReady.FAILED})
_RESPONSE: Final = health_pb2.HealthCheckResponse


class _Moment:
    """One state, until `changed` says that there is a `following` one or that there will be none."""

    def __init__(self, *, serving: bool, alive: bool) -> None:
        self.serving = serving
        self.alive = alive
        self.following: _Moment | None = None
        self.changed = asyncio.Event()


class Health:
    """What probes are told. Everything is NOT_SERVING until `report` says otherwise."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """Answers for the process and for `service_names`; those of operators are as the process is."""
        self._names = ("", *service_names)
        self._now = _Moment(serving=False, alive=False)
        self._not_ready: NotReady | None = NotReady.LOADING
        self._draining = False
        self._closed = False
        self._ended = asyncio.Event()

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC."""
        return {"Check": self.check, "List": self.list_all, "Watch": self.watch}

    @property
    def not_ready(self) -> NotReady | None:
        """Why services are NOT_SERVING; None while they are SERVING."""
        return self._not_ready

    def report(self, not_ready: NotReady | None, *, alive: bool | None = None) -> None:
        """Tell probes and watchers, if it is news.

        Args:
            not_ready: why services want no work; None: they do. What was said for good stays.
            alive: of the process; by default it is as services are.
        """
        alive = (not_ready is None if alive is None else alive) and not self._closed
        if self._closed or self._draining:
            not_ready = NotReady.STOPPING if self._closed else NotReady.DRAINING
        if (not_ready, alive) == (self._not_ready, self._now.alive):
            return
        self._not_ready = not_ready
        fields = {"serving": not_ready is None, "alive": alive, "reason": not_ready and not_ready.value}
        logger.info("health", extra={"fields": fields})
        self._go_on(serving=not_ready is None, alive=alive)

    def drain(self) -> None:
        """Services are NOT_SERVING for good; the process stays alive."""
        self._draining = True
        self.report(NotReady.DRAINING, alive=self._now.alive)

    def close(self) -> None:
        """NOT_SERVING for good."""
        self._closed = True
        self.report(NotReady.STOPPING)

    def end_watches(self) -> None:
        """End every watcher's stream, and refuse new ones. Call last: watchers come back at once while they can."""
        self.close()
        self._ended.set()
        self._now.changed.set()

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
        """How one service is, and then each change, in order."""
        moment, told = self._now, None
        while True:
            status = self._status(request.service, moment)
            if status != told:
                await context.write(status)
                told = status
            elif moment.following is not None:
                moment = moment.following
            elif self.has_ended:
                raise UnavailableError("stopped", "the service is shutting down")
            else:
                await moment.changed.wait()

    def _status(self, name: str, moment: _Moment | None = None) -> health_pb2.HealthCheckResponse:
        if name not in self._names:
            return _RESPONSE(status=_RESPONSE.SERVICE_UNKNOWN)
        moment = moment or self._now
        good = moment.alive if name in OF_THE_PROCESS else moment.serving
        return _RESPONSE(status=_RESPONSE.SERVING if good else _RESPONSE.NOT_SERVING)

    def _go_on(self, *, serving: bool, alive: bool) -> None:
        """Begin another moment, if it differs from this one to probes."""
        before = self._now
        if (serving, alive) != (before.serving, before.alive):
            self._now = before.following = _Moment(serving=serving, alive=alive)
            before.changed.set()


async def follow_engine(engine: Engine, health: Health, *, stall_seconds: float) -> None:
    """Report the truth until the engine has died.

    Its step in hand is younger than `stall_seconds`, a model is there, and memory is left for work. A stuck step is
    told `POLL_SECONDS` after that age at the latest, the engine's death and a model that comes or goes at once.
    """
    memory = MemoryWatch(time.monotonic)
    failed = asyncio.ensure_future(engine.wait_failed())

    def look() -> None:
        not_ready = _not_ready(engine, stall_seconds, memory)
        health.report(not_ready, alive=not_ready not in OF_A_DEAD_PROCESS)

    end_observing = engine.observe(look)
    try:
        while not failed.done():
            look()
            await asyncio.wait({failed}, timeout=POLL_SECONDS)
        health.report(NotReady.FAILED)
    finally:
        end_observing()
        failed.cancel()


def _not_ready(engine: Engine, stall_seconds: float, memory: MemoryWatch) -> NotReady | None:
    if engine.state is not EngineState.READY:
        return NotReady.LOADING if engine.state is EngineState.LOADING else NotReady.FAILED
    if engine.stalled_seconds() >= stall_seconds:
        return NotReady.STALLED
    if not engine.can_serve:
        return NotReady.NO_MODEL
    return NotReady.OUT_OF_MEMORY if memory.is_short(engine.memory()) else None
