"""One server process from its first line to its last: bind, load, serve, drain, stop.

The address is bound before the model is loaded, so that probes are answered and a taken port is known at once.
Signals are handled from the start: a second one cuts the grace short, a third one ends the process as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import EngineError
from engine.execution.engine import Engine
from engine.execution.state_room import smallest_row_bytes
from service.address import Address, AddressError
from service.health import Health, follow_engine
from service.live import LiveGenerations
from service.server import SERVICE_NAMES, BindError, bind, build_server
from service.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from engine.contracts.model import ModelInfo
    from engine.execution.resident import EngineSettings
    from service.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What should end by itself gets this long: streams once the engine has stopped, then answers on their way.
CLOSE_SECONDS: Final = 0.5


class StartError(Exception):
    """The server cannot start; the message is one line for the operator."""


class Signals:
    """Counts requests to stop: the first begins the end, the second hurries it."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """Ask the server to stop."""
        if not self.first.is_set():
            self.first.set()
            return
        self.second.set()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


async def run_server(
    settings: ServerSettings, signals: Signals, *, engine_class: Callable[[EngineSettings], Engine] = Engine
) -> None:
    """Serve until `signals` ask to stop.

    Raises:
        StartError: nothing could be served.
    """
    address = checked_address(settings)
    prepare_state_dir(settings)
    engine = engine_class(settings.engine_settings())
    live, health = LiveGenerations(), Health(SERVICE_NAMES)
    server = build_server(engine, live, health)
    try:
        address = bind(server, address)
        await server.start()
        model = await before(signals.first, load(engine))
        if model is None:
            logger.info("stopped before the model was loaded")
        else:
            warn_of_small_state(settings, model)
            await serve(engine, health, signals, stall_seconds=settings.health_stall_seconds, model=model, at=address)
            await drain(live, health, signals, grace_seconds=settings.shutdown_grace_seconds)
    except BindError as error:
        raise StartError(str(error)) from None
    finally:
        await close(engine, live, health, server, signals)


def checked_address(settings: ServerSettings) -> Address:
    """The address to listen on; one that others can reach needs consent, since traffic is not encrypted."""
    try:
        address = Address.parse(settings.listen)
    except AddressError as error:
        raise StartError(f"--listen: {error}") from None
    if not (address.is_loopback or settings.insecure):
        raise StartError(
            f"--listen: {address} can be reached from outside without encryption; allow it with --insecure"
        )
    return address


def prepare_state_dir(settings: ServerSettings) -> None:
    """Make the folder in which the engine keeps its state."""
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--state-dir: {settings.state_dir}: {error.strerror}") from None


async def load(engine: Engine) -> ModelInfo:
    """Load and warm the model."""
    try:
        return await engine.start()
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
    engine: Engine, health: Health, signals: Signals, *, stall_seconds: float, model: ModelInfo, at: Address
) -> None:
    """Announce the server and keep its health true until it is asked to stop."""
    follower = asyncio.ensure_future(follow_engine(engine, health, stall_seconds=stall_seconds))
    try:
        health.report(serving=True)
        sys.stdout.write(f"serving {model.name} on {at}\n")
        sys.stdout.flush()
        await signals.first.wait()
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower


async def drain(live: LiveGenerations, health: Health, signals: Signals, *, grace_seconds: float) -> None:
    """Refuse new work, and let what runs end by itself for a while."""
    live.drain()
    health.close()
    logger.info("stopping", extra={"fields": {"live_generations": live.count}})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            await before(signals.second, live.wait_idle())


async def close(
    engine: Engine, live: LiveGenerations, health: Health, server: grpc.aio.Server, signals: Signals
) -> None:
    """End what is left: streams first, by the engine's word, then the connections."""
    live.drain()
    health.close()
    await engine.stop(signals.second)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await live.wait_idle()
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
