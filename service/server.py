"""Assembles the gRPC server: services, health, reflection, limits. Binding is apart, since it comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc

from mlxstream.v1 import admin_pb2, generation_pb2, model_pb2
from service.address import Address, BindError, require_bindable
from service.admin import AdminHandlers
from service.generation import GenerationHandlers
from service.health import HEALTH_SERVICE
from service.models import ModelHandlers
from service.orca import LoadReports
from service.reflection import reflection_handlers
from service.rpc import MAX_MESSAGE_BYTES, UnknownMethods, service_handler
from service.telemetry import Telemetry

if TYPE_CHECKING:
    from engine.execution.engine import Engine
    from service.health import Health
    from service.live import LiveGenerations

GENERATION_SERVICE: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODEL_SERVICE: Final = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAMES: Final = tuple(service.full_name for service in (GENERATION_SERVICE, MODEL_SERVICE, ADMIN_SERVICE))

# Long prompts are silent for minutes: callers may ping as they like, and we ask whether they are still there.
CHANNEL_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 30_000),
)


def build_server(
    engine: Engine, live: LiveGenerations, health: Health, telemetry: Telemetry | None = None
) -> grpc.aio.Server:
    """A server with every service, bound to nothing yet. `telemetry` is made here unless it is needed elsewhere too."""
    telemetry = telemetry or Telemetry(engine)
    live.observe(telemetry.ended)
    reports = LoadReports(engine, telemetry.meter, health)
    generation = GenerationHandlers(engine, live, telemetry.metrics).by_name()
    admin = AdminHandlers(engine, live, health, telemetry.meter).by_name()
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers(
        (
            service_handler(GENERATION_SERVICE, telemetry.counted(GENERATION_SERVICE, generation, reports.trailer)),
            service_handler(MODEL_SERVICE, telemetry.counted(MODEL_SERVICE, ModelHandlers(engine).by_name())),
            service_handler(ADMIN_SERVICE, telemetry.counted(ADMIN_SERVICE, admin)),
            service_handler(reports.service, reports.by_name()),
            service_handler(HEALTH_SERVICE, health.by_name()),
            *reflection_handlers((*SERVICE_NAMES, HEALTH_SERVICE.full_name)),
            UnknownMethods(),
        )
    )
    return server


def bind(server: grpc.aio.Server, address: Address) -> Address:
    """Bind `server` and return the address with its real port.

    Raises:
        BindError: the address is in use, is not ours, or has no such host.
    """
    require_bindable(address)
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise BindError(f"cannot listen on {address}") from None
    return address.with_port(port)
