"""Channelz: what gRPC knows of its own connections, for operators; the library's answers, behind our gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from grpc_channelz.v1 import channelz, channelz_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from service.rpc import Handler

CHANNELZ_SERVICE: Final = cast("ServiceDescriptor", channelz_pb2.DESCRIPTOR.services_by_name["Channelz"])


def channelz_handlers() -> dict[str, Handler]:
    """Handlers by RPC."""
    servicer: Any = channelz.aio.ChannelzServicer()
    return {method.name: getattr(servicer, method.name) for method in CHANNELZ_SERVICE.methods}
