"""How a server is reached: what a target and a deadline may be, the channel with its settings, and the stubs."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from mlxstream.v1.generation_pb2_grpc import GenerationServiceStub
from mlxstream.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:  # names that exist for type checkers alone
    from mlxstream.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from mlxstream.v1.model_pb2_grpc import ModelServiceAsyncStub

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
# A call is tried again only while the server has not taken it up: once the first event came, never.
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "mlxstream.v1.GenerationService"}, {"service": "mlxstream.v1.ModelService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
# Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
)
LOOPBACK_PREFIXES = ("127.", "localhost:", "[::1]:", "unix:")
# What gRPC resolves by itself; everything else must be HOST:PORT.
TARGET_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+):(\d{1,5})")
MOST_SECONDS = 10.0**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel and its stubs, bound to the event loop on which they were made."""

    loop: asyncio.AbstractEventLoop
    channel: grpc.aio.Channel
    generations: GenerationServiceAsyncStub
    models: ModelServiceAsyncStub
    health_check: grpc.aio.UnaryUnaryMultiCallable[HealthCheckRequest, HealthCheckResponse]


def connect(target: str, credentials: grpc.ChannelCredentials | None) -> Connection:
    """Make a channel on the running event loop; the network is touched by the first call."""
    options = CHANNEL_OPTIONS
    if target.startswith(LOOPBACK_PREFIXES):
        options = (*options, ("grpc.enable_http_proxy", 0))
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    return Connection(
        loop=asyncio.get_running_loop(),
        channel=channel,
        generations=GenerationServiceStub(channel),
        models=ModelServiceStub(channel),
        health_check=HealthStub(channel).Check,  # type: ignore[attr-defined]
    )


def checked_target(target: str) -> str:
    """The target, if it has the form of one.

    Raises:
        ValueError: It has not. (A name that leads nowhere shows with the first call.)
    """
    found = HOST_AND_PORT.fullmatch(target)
    if (found and 0 < int(found.group(1)) < 65536) or target.startswith(TARGET_SCHEMES):
        return target
    raise ValueError(f"the target must be HOST:PORT or unix:PATH, not {target!r}")


def checked_timeout(timeout_seconds: float | None) -> float | None:
    """The deadline of a call, if it can be one; None means none.

    Raises:
        ValueError: It is not a number of seconds above 0.
    """
    if timeout_seconds is None or 0 < timeout_seconds < MOST_SECONDS:
        return timeout_seconds
    raise ValueError(f"timeout_seconds must be above 0 and finite (None: no deadline), not {timeout_seconds:g}")
