"""Channelz: what gRPC knows of its own connections, for operators; the library's answers, behind our gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2

from engine.contracts.errors import EngineError, NotFoundError

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from service.rpc import Context, Handler

CHANNELZ_SERVICE: Final = cast("ServiceDescriptor", channelz_pb2.DESCRIPTOR.services_by_name["Channelz"])


def channelz_handlers() -> dict[str, Handler]:
    """Handlers by RPC."""
    servicer: Any = channelz.aio.ChannelzServicer()
    return {method.name: _raising(getattr(servicer, method.name)) for method in CHANNELZ_SERVICE.methods}


class _Outcome:
    """Stands for the context of a call: a code that the library sets there would come without our details."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Told before `set_details`, and before an answer that is None."""
        self.code = code

    def set_details(self, details: str) -> None:
        """See `set_code`."""
        self.details = details


def _raising(answer: Any) -> Handler:
    """The library's `answer`, with failures as errors of ours."""

    async def call(request: Message, _context: Context) -> Message:
        outcome = _Outcome()
        answered: Message | None = await answer(request, outcome)
        if answered is not None:
            return answered
        if outcome.code is not grpc.StatusCode.NOT_FOUND:
            raise EngineError(outcome.details)
        named = request.DESCRIPTOR.fields[0]
        raise NotFoundError(named.name.removesuffix("_id"), str(getattr(request, named.name)))

    return call
