"""What a server offers, to whom, and within which bounds; and what the log says of it when it listens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine.execution.resident import DEFAULT_DISK_BYTES
from mlxstream.v1 import admin_pb2, generation_pb2, model_pb2
from service.access import Access
from service.limits import RequestLimits

if TYPE_CHECKING:
    from service.listening import Entrance, ListenAddress
    from service.settings import ServerSettings

logger = logging.getLogger(__name__)

GENERATION_SERVICE: Final = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODEL_SERVICE: Final = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
# Who connects and says nothing is not waited for longer.
HANDSHAKE_SECONDS: Final = 10
# Calls of one connection beyond `max_streams`, which we refuse ourselves, with numbers, and which probes need.
SPARE_STREAMS: Final = 128
# Calls that have come and that the loop has not looked at yet, of all connections, for each that we take. Left alone,
# gRPC ends what is beyond 1000, at random and as CANCELLED; a burst of callers is for us to take or to refuse.
PENDING_SHARE: Final = 4
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a server offers, and to whom. By default everything, to everybody who can connect."""

    access: Access = field(default_factory=Access)
    limits: RequestLimits = field(default_factory=RequestLimits)
    admin: bool = True
    reflection: bool = True
    channelz: bool = False
    keepalive_seconds: float = 60.0

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of our services that are on; health answers for each."""
        services = (GENERATION_SERVICE, MODEL_SERVICE, *([ADMIN_SERVICE] if self.admin else []))
        return tuple(service.full_name for service in services)

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Settings of gRPC itself; keys that it does not know are ignored without a word.

        Long prompts are silent for minutes: callers may ping as they like, and we ask whether they are still there.
        """
        limits = self.limits
        most_pending = PENDING_SHARE * (limits.max_streams + SPARE_STREAMS)
        return (
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
            ("grpc.max_concurrent_streams", limits.max_streams + SPARE_STREAMS),
            ("grpc.server.max_pending_requests", most_pending),
            ("grpc.server.max_pending_requests_hard_limit", most_pending),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", -1),  # chunks are cut by tokens; for answers: max_answer_bytes
            ("grpc.max_metadata_size", limits.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", round(500 * self.keepalive_seconds)),
            ("grpc.http2.ping_timeout_ms", round(500 * self.keepalive_seconds)),  # the one that newer cores obey
            ("grpc.enable_channelz", int(self.channelz)),
        )


def is_offered(wish: bool | None, address: ListenAddress) -> bool:
    """Whether a service of operators or tools is offered at `address`; where nothing is said, on a local one alone."""
    return address.is_local if wish is None else wish


def offer_of(settings: ServerSettings, entrance: Entrance) -> Offer:
    """What is offered: services of operators and tools are off where others can reach them, unless asked for."""
    return Offer(
        access=entrance.access,
        admin=is_offered(settings.admin, entrance.address),
        reflection=is_offered(settings.reflection, entrance.address),
        channelz=settings.channelz,
        limits=settings.request_limits(),
        keepalive_seconds=settings.keepalive_seconds,
    )


def when_unset(settings: ServerSettings, address: ListenAddress) -> dict[str, object]:
    """What holds for settings that have no value, as far as neither the model nor the machine decides it, by name."""
    return {
        "unix_socket_mode": f"{settings.unix_mode:o}",
        "admin": is_offered(settings.admin, address),
        "reflection": is_offered(settings.reflection, address),
        "checkpoint_bytes": DEFAULT_DISK_BYTES,
        "prefix_cache_disk_bytes": DEFAULT_DISK_BYTES,
    }


def tell_entrance(address: ListenAddress, entrance: Entrance, offer: Offer) -> None:
    """Log what was bound and how it is protected, and what an operator may have overlooked."""
    tls, local = entrance.tls, address.is_local
    fields = {
        "address": address,
        "encryption": "none" if tls is None else "tls",
        "client_certificates": "required" if tls is not None and tls.asks_clients else "none",
        "tokens": "required" if offer.access.asks_tokens else "none",
        "admin": "on" if offer.admin else "off",
        "reflection": "on" if offer.reflection else "off",
        "channelz": "on" if offer.channelz else "off",
    }
    logger.info("listening", extra={"fields": fields})
    if not local and not offer.access.asks_tokens and not (tls is not None and tls.asks_clients):
        logger.warning("everybody who can reach this address may use it: give --tokens-file or --tls-client-ca")
    if not local and tls is None and offer.access.asks_tokens:
        logger.warning("tokens travel unencrypted to this address: give --tls-cert and --tls-key")
