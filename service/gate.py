"""The gate of one service: what a call must show before its message is read, and how many may be inside.

A refusal costs the server no byte of the message: it is given while gRPC looks for the method. Handlers that need to
know who calls ask `Access.caller_of`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.contracts.errors import EngineError
from service.arrival import OF_CALLERS, OF_PROBES, Arrival

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import grpc

    from service.access import Access
    from service.callers import Permission
    from service.streams import Streams


def _nobody_counts(_method: str, _error: EngineError) -> None:
    """Where refusals are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Lets in who has `permission`; None opens the service to everybody, as probes need it.

    `streams` counts who is inside, but for calls of the methods `uncounted`; None counts nobody. `arrival` bounds a
    message where callers are known and counted. `refused` is told of each call that never reaches its handler:
    "package.Service/Method", and why.
    """

    access: Access
    permission: Permission | None
    streams: Streams | None = None
    uncounted: frozenset[str] = frozenset()
    arrival: Arrival = OF_CALLERS
    refused: Callable[[str, EngineError], None] = _nobody_counts

    def require(self, call: grpc.HandlerCallDetails, service: str) -> None:
        """Refuse a call that cannot be let in to `service`.

        Raises:
            UnauthenticatedError: nobody knows the caller.
            PermissionDeniedError: the service is not open to the caller.
            OverloadedError: too many are inside.
        """
        if self.permission is None:
            return
        try:
            caller = self.access.require(self.permission, call.invocation_metadata or (), service)
            if self.streams is not None and call.method.rpartition("/")[2] not in self.uncounted:
                self.streams.require_room(caller)
        except EngineError as error:
            self.refused(call.method.removeprefix("/"), error)
            raise

    def inside(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> AbstractContextManager[None]:
        """Around one call of `method`, from its headers on; entering it is refused when there are too many by now."""
        if self.streams is None or method in self.uncounted:
            return contextlib.nullcontext()
        return self.streams.counted(self.access.caller_of(context))

    def arrival_of(self, method: str) -> Arrival:
        """Bounds on the messages of a call of `method`."""
        return OF_PROBES if self.permission is None or method in self.uncounted else self.arrival
