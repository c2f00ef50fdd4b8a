"""Channelz: what gRPC knows of its own connections, for operators, behind our gate.

gRPC's core answers in JSON. `grpcio-channelz` brings the schema, but its own handlers fail with INTERNAL on whatever
field the core is newer by, as `maxConnectionsPerSubchannel` of channels is (1.85); here such fields are left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf import json_format, message_factory
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in its stubs
from grpc_channelz.v1 import channelz_pb2

from engine.contracts.errors import NotFoundError

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

    from service.rpc import Context, Handler

CHANNELZ_SERVICE: Final = cast("ServiceDescriptor", channelz_pb2.DESCRIPTOR.services_by_name["Channelz"])

_CORE_TAKES: Final = {"GetServerSockets": 3}
"""How many of a request's fields the core is given, in their order, where it is not the first alone."""


def channelz_handlers() -> dict[str, Handler]:
    """Handlers by RPC."""
    return {method.name: _answering(method) for method in CHANNELZ_SERVICE.methods}


def _answering(method: MethodDescriptor) -> Handler:
    ask: Any = getattr(cygrpc, "channelz" + re.sub("[A-Z]", lambda capital: "_" + capital[0].lower(), method.name))
    fields = [field.name for field in method.input_type.fields][: _CORE_TAKES.get(method.name, 1)]
    answer = message_factory.GetMessageClass(method.output_type)

    async def call(request: Message, _context: Context) -> Message:
        given = [getattr(request, field) for field in fields]
        try:
            told = ask(*given)
        except ValueError:
            raise NotFoundError(fields[0].removesuffix("_id"), str(given[0])) from None
        return json_format.Parse(told, answer(), ignore_unknown_fields=True)

    return call
