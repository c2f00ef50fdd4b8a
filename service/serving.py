"""One server from its address to its last connection: bind, wait for the model, serve, drain, stop.

The address is bound while the model loads, so that probes are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import EngineError
from engine.execution.state_room import smallest_row_bytes
from service.address import Address, BindError
from service.durable.generations import DurableGenerations
from service.health import Health, follow_engine
from service.libraries import collect_soon
from service.live import LiveGenerations
from service.offer import offer_of, tell_entrance
from service.pulse import beat
from service.server import bind, build_server
from service.stopping import StartError
from service.telemetry import Telemetry
from service.tracing import open_tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import grpc

    from engine.contracts.model import ModelInfo
    from engine.execution.engine import Engine
    from service.listening import Entrance, ListenAddress
    from service.metrics import Metrics
    from service.metrics_server import MetricsServer
    from service.settings import ServerSettings
    from service.stopping import Signals

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What should end by itself gets this long: streams once the engine has stopped, then answers on their way.
CLOSE_SECONDS: Final = 0.5


async def serve_engine(
    engine: Engine, loading: asyncio.Future[ModelInfo], settings: ServerSettings, signals: Signals, entrance: Entrance
) -> None:
    """Serve `engine`, whose model is `loading`, at `entrance` until `signals` ask to stop.

    Raises:
        StartError: nothing could be served.
    """
    offer = offer_of(settings, entrance)
    live, health = LiveGenerations(), Health(offer.service_names)
    metrics = wanted_metrics(settings, engine)
    try:
        telemetry = Telemetry(engine, open_tracing(settings.otlp_endpoint), metrics)
    except StartError:
        loading.cancel()
        await engine.stop()
        raise
    durable = DurableGenerations(engine, live, grace_seconds=settings.resume_grace_seconds)
    server = build_server(engine, live, health, durable, offer, telemetry)
    pulse = asyncio.ensure_future(beat(telemetry.meter, telemetry.metrics))
    metrics_server: MetricsServer | None = None
    address = entrance.address
    try:
        address = bind(server, entrance.address, entrance.tls)
        metrics_server = served_metrics(settings, metrics)
        await server.start()
        tell_entrance(address, entrance, offer)
        model = await before(signals.first, loaded(loading))
        if model is None:
            logger.info("stopped before the model was loaded")
        else:
            warn_of_small_state(settings, model)
            await serve(engine, health, signals, stall_seconds=settings.health_stall_seconds, model=model, at=address)
            await drain(
                live,
                health,
                durable,
                signals,
                late_seconds=settings.shutdown_late_seconds,
                grace_seconds=settings.shutdown_grace_seconds,
            )
    except BindError as error:
        raise StartError(str(error)) from None
    finally:
        loading.cancel()
        pulse.cancel()
        scraping = [] if metrics_server is None else [asyncio.to_thread(metrics_server.close)]
        await asyncio.gather(close(engine, live, health, durable, server, signals), *scraping)
        address.release()
        telemetry.tracing.close()


def wanted_metrics(settings: ServerSettings, engine: Engine) -> Metrics | None:
    """What counts for Prometheus, if metrics are served."""
    if settings.metrics_listen is None:
        return None
    from service.metrics import Metrics  # its library takes a while

    return Metrics(engine)


def served_metrics(settings: ServerSettings, metrics: Metrics | None) -> MetricsServer | None:
    """The metrics' own port, if one was asked for.

    Raises:
        BindError: it cannot be listened on.
    """
    if settings.metrics_listen is None or metrics is None:
        return None
    from service.metrics_server import MetricsServer  # as for `wanted_metrics`

    metrics_server = MetricsServer(metrics.registry, Address.parse(settings.metrics_listen))
    logger.info("metrics", extra={"fields": {"address": str(metrics_server.address)}})
    return metrics_server


async def loaded(loading: asyncio.Future[ModelInfo]) -> ModelInfo:
    """The model once it is loaded and warm."""
    try:
        return await loading
    except EngineError as error:
        raise StartError(f"cannot load the model: {error}") from None


def warn_of_small_state(settings: ServerSettings, model: ModelInfo) -> None:
    """Say so if `--state-bytes` leaves room for no request at all: each would be refused."""
    needed_bytes = smallest_row_bytes(model)
    if settings.state_bytes is not None and settings.state_bytes < needed_bytes:
        logger.warning(
            "--state-bytes is too small for any request",
            extra={"fields": {"state_bytes": settings.state_bytes, "smallest_request_bytes": needed_bytes}},
        )


async def serve(
    engine: Engine, health: Health, signals: Signals, *, stall_seconds: float, model: ModelInfo, at: ListenAddress
) -> None:
    """Announce the server and keep its health true until it is asked to stop."""
    follower = asyncio.ensure_future(follow_engine(engine, health, stall_seconds=stall_seconds))
    try:
        await asyncio.sleep(0)  # it has looked once
        collect_soon()
        sys.stdout.write(f"serving {model.name} on {at}\n")
        sys.stdout.flush()
        await signals.first.wait()
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower


async def drain(
    live: LiveGenerations,
    health: Health,
    durable: DurableGenerations,
    signals: Signals,
    *,
    late_seconds: float,
    grace_seconds: float,
) -> None:
    """Say that this server ends, take what balancers still send for a moment, then let what runs end by itself.

    Durable generations that nobody reads end at once: they can be resumed.
    """
    health.close()
    logger.info("stopping", extra={"fields": {"live_generations": live.count}})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(late_seconds):
            await signals.second.wait()
    live.drain()
    durable.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            await before(signals.second, live.wait_idle())


async def close(
    engine: Engine,
    live: LiveGenerations,
    health: Health,
    durable: DurableGenerations,
    server: grpc.aio.Server,
    signals: Signals,
) -> None:
    """End what is left: streams first, by the engine's word, then the connections."""
    live.drain()
    health.close()
    await engine.stop(signals.second)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await live.wait_idle()
    durable.close()
    health.end_watches()
    await server.stop(CLOSE_SECONDS)


async def before(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None if `event` is set first; `work` is cancelled then."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiter.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartError):
            await task
