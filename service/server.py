"""Assembles the gRPC server: services, each behind its gate, health, reflection, limits. Binding comes first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import grpc

from service.address import BindError
from service.admin import AdminHandlers
from service.arrival import Arrival
from service.callers import Permission
from service.gate import Gate
from service.generation import GenerationHandlers
from service.health import HEALTH_SERVICE
from service.models import ModelHandlers
from service.offer import ADMIN_SERVICE, GENERATION_SERVICE, MODEL_SERVICE
from service.orca import LoadReports
from service.reflection import reflection_handlers
from service.rpc import UnknownMethods, bounded, service_handler
from service.streams import Streams
from service.telemetry import Telemetry

if TYPE_CHECKING:
    from engine.execution.engine import Engine
    from service.durable.generations import DurableGenerations
    from service.health import Health
    from service.listening import ListenAddress
    from service.live import LiveGenerations
    from service.offer import Offer
    from service.tls import Tls

# Abort must be possible for whoever has too many calls.
UNCOUNTED: Final = frozenset({"Abort"})


def build_server(
    engine: Engine,
    live: LiveGenerations,
    health: Health,
    durable: DurableGenerations,
    offer: Offer,
    telemetry: Telemetry | None = None,
) -> grpc.aio.Server:
    """A server with every service of `offer`, bound to nothing yet. What is not offered is an unknown method.

    `telemetry` is made here unless it is needed elsewhere too.
    """
    telemetry = telemetry or Telemetry(engine)
    live.observe(telemetry.ended)
    telemetry.metrics.show_readiness(lambda: health.not_ready)
    reports = LoadReports(engine, telemetry.meter, health)
    handling = GenerationHandlers(engine, live, offer.access, offer.limits, durable, telemetry.metrics)
    generation, models = handling.by_name(), ModelHandlers(engine).by_name()
    gate = functools.partial(Gate, access=offer.access, arrival=Arrival(limit_seconds=offer.limits.max_message_seconds))
    streams, refused = Streams(offer.limits), telemetry.refused
    applications = gate(permission=Permission.APPLICATION, streams=streams, uncounted=UNCOUNTED, refused=refused)
    operators, everybody = gate(permission=Permission.ADMIN, refused=refused), gate(permission=None)
    counted, bound = telemetry.counted, functools.partial(bounded, limit_bytes=offer.limits.max_answer_bytes)
    server = grpc.aio.server(options=offer.channel_options())
    handlers = [
        service_handler(
            GENERATION_SERVICE, counted(GENERATION_SERVICE, bound(generation), reports.trailer), applications
        ),
        service_handler(MODEL_SERVICE, counted(MODEL_SERVICE, bound(models)), applications),
        service_handler(HEALTH_SERVICE, health.by_name(), everybody),
        service_handler(reports.service, reports.by_name(), everybody),
    ]
    if offer.admin:
        admin = AdminHandlers(engine, live, health, durable, telemetry.meter).by_name()
        handlers.append(service_handler(ADMIN_SERVICE, counted(ADMIN_SERVICE, bound(admin)), operators))
    if offer.channelz:
        from service.channelz import CHANNELZ_SERVICE, channelz_handlers  # seldom offered, and takes a while

        handlers.append(service_handler(CHANNELZ_SERVICE, channelz_handlers(), operators))
    if offer.reflection:
        handlers += reflection_handlers((*offer.service_names, HEALTH_SERVICE.full_name), everybody)
    server.add_generic_rpc_handlers((*handlers, UnknownMethods()))
    return server


def bind(server: grpc.aio.Server, address: ListenAddress, tls: Tls | None = None) -> ListenAddress:
    """Bind `server`, with `tls` if it is given, and return the address with its real port.

    Raises:
        BindError: the address is in use, is not ours, or has no such host.
    """
    address.require_bindable()
    try:
        with address.binding() as target:
            port = (
                server.add_insecure_port(target) if tls is None else server.add_secure_port(target, tls.credentials())
            )
    except (RuntimeError, OSError):
        raise BindError(f"cannot listen on {address}") from None
    return address.bound(port)
