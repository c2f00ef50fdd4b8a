"""How servers are reached: targets, TLS, tokens and deadlines, the channel with its settings, and the stubs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_health.v1.health_pb2_grpc import HealthStub

from mlxstream.v1 import admin_pb2, generation_pb2, model_pb2
from mlxstream.v1.generation_pb2_grpc import GenerationServiceStub
from mlxstream.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:  # names that exist for type checkers alone
    from mlxstream.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from mlxstream.v1.model_pb2_grpc import ModelServiceAsyncStub

READINESS_SERVICE = "mlxstream.v1.GenerationService"
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
# A call is tried again only while the server has not taken it up: once the first event came, never. Where a server that
# is full does not say when to come back, it says that it is no use (`grpc-retry-pushback-ms`).
RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}
RETRIED_SERVICES = ("mlxstream.v1.GenerationService", "mlxstream.v1.ModelService")
# Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
LOOPBACK_PREFIXES = ("127.", "localhost:", "[::1]:", "unix:", "ipv4:127.", "ipv6:[::1]")
# What gRPC resolves by itself; everything else must be HOST:PORT.
TARGET_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+):(\d{1,5})")
MOST_SECONDS = 10.0**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Whom to trust, and who to be: PEM bytes.

    Without `ca` the system's authorities are trusted. `certificate` and `key` are shown to servers that ask (mTLS).
    `server_name` is what the server's certificate must name, where that is not the host of the target.
    """

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None

    @classmethod
    def from_files(
        cls,
        *,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> Tls:
        """Read the PEM files."""
        read = [None if path is None else Path(path).read_bytes() for path in (ca, certificate, key)]
        return cls(ca=read[0], certificate=read[1], key=read[2], server_name=server_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel and its stubs, bound to the event loop on which they were made."""

    loop: asyncio.AbstractEventLoop
    channel: grpc.aio.Channel
    generations: GenerationServiceAsyncStub
    models: ModelServiceAsyncStub
    health: Any


def connect(target: str, *, tls: Tls | None, balanced: bool) -> Connection:
    """Make a channel on the running event loop; the network is touched by the first call."""
    options = (*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(service_config(balanced=balanced))))
    if target.startswith(LOOPBACK_PREFIXES):
        options = (*options, ("grpc.enable_http_proxy", 0))
    if tls is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        if tls.server_name is not None:
            options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    return Connection(
        loop=asyncio.get_running_loop(),
        channel=channel,
        generations=GenerationServiceStub(channel),
        models=ModelServiceStub(channel),
        health=HealthStub(channel),
    )


def unary_method(name: str) -> tuple[str, type[Message]]:
    """The path of a call such as "AdminService/Drain", and the class of its answer.

    Raises:
        ValueError: The schema has no such call, or it streams.
    """
    service_name, _, method_name = name.partition("/")
    for file in (admin_pb2, generation_pb2, model_pb2):
        service = file.DESCRIPTOR.services_by_name.get(service_name)
        method = service.methods_by_name.get(method_name) if service is not None else None
        if method is not None and not method.server_streaming:
            return f"/{service.full_name}/{method_name}", message_factory.GetMessageClass(method.output_type)
    raise ValueError(f"{name!r} is no call of the schema that has one answer")


def service_config(*, balanced: bool) -> dict[str, Any]:
    """Retries; where calls are `balanced`, also round robin among the servers whose health says that they serve."""
    config: dict[str, Any] = {
        "methodConfig": [{"name": [{"service": name} for name in RETRIED_SERVICES], "retryPolicy": RETRY_POLICY}]
    }
    if balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": READINESS_SERVICE}
    return config


def checked_targets(target: str | Sequence[str]) -> tuple[str, ...]:
    """The targets, if they have the form of such; several must be of one kind.

    Raises:
        ValueError: They have not. (A name that leads nowhere shows with the first call.)
    """
    targets = (target,) if isinstance(target, str) else tuple(target)
    for one in targets:
        found = HOST_AND_PORT.fullmatch(one)
        if not (found and 0 < int(found.group(1)) < 65536) and not one.startswith(TARGET_SCHEMES):
            raise ValueError(f"the target must be HOST:PORT or unix:PATH, not {one!r}")
    joined(targets)
    return targets


def joined(targets: Sequence[str]) -> str:
    """The targets as one. gRPC takes a list only of addresses of one kind.

    Raises:
        ValueError: They are none, or of several kinds.
    """
    if len(targets) == 1:
        return targets[0]
    kinds = {"ipv6" if target.startswith("[") else "ipv4" for target in targets}
    if len(kinds) != 1:
        raise ValueError("several targets must all be IPv4 or all be IPv6 addresses with a port")
    return f"{kinds.pop()}:{','.join(targets)}"


def checked_timeout(timeout_seconds: float | None) -> float | None:
    """The deadline of a call, if it can be one; None means none.

    Raises:
        ValueError: It is not a number of seconds above 0.
    """
    if timeout_seconds is None or 0 < timeout_seconds < MOST_SECONDS:
        return timeout_seconds
    raise ValueError(f"timeout_seconds must be above 0 and finite (None: no deadline), not {timeout_seconds:g}")


def checked_token(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that presents a bearer token.

    Raises:
        ValueError: It is empty, or holds what no header can.
    """
    if token is None:
        return ()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token is made of visible ASCII characters")
    return (("authorization", f"Bearer {token}"),)
