"""One message of a call from its headers to its last byte: how long that may take, and how large it may be.

gRPC holds what has come of a message for as long as the call lives, and bounds messages for the whole server alone. So
a handler begins at the headers, reads for itself, and ends the call of whoever stops halfway. Units: seconds and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from service.limits import MAX_MESSAGE_SECONDS
from service.refusals import MalformedMessageError, MessageLateError, MessageTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Context = grpc.aio.ServicerContext[Any, Any]

CANCELLATION_SECONDS: Final = 0.1
"""So long after gRPC has ended a call its handler has been cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Bounds on one message; None leaves its size to gRPC."""

    limit_seconds: float
    limit_bytes: int | None = None

    async def message(self, context: Context) -> bytes | None:
        """The next message; None when no more will come.

        Raises:
            MessageLateError: it is not there in time.
            MessageTooLargeError: it is larger than the bound.
        """
        try:
            async with asyncio.timeout(None) as timeout:
                with _expiring(timeout, self.limit_seconds):
                    message: Any = await context.read()
        except TimeoutError:
            raise MessageLateError(limit_seconds=self.limit_seconds) from None
        if message is grpc.aio.EOF:
            return None
        if self.limit_bytes is not None and len(message) > self.limit_bytes:
            raise MessageTooLargeError(
                message_bytes=len(message),
                limit_bytes=self.limit_bytes,
                what="the request has {} bytes, {} are allowed",
            )
        return bytes(message)

    async def only_message(self, context: Context, name: str) -> bytes:
        """The one message of a call, which is called `name`.

        Raises:
            MalformedMessageError: the call has none.
            EngineError: as for `message`.
        """
        message = await self.message(context)
        if message is None:
            await asyncio.sleep(CANCELLATION_SECONDS)  # gRPC has ended the call of a message that is too large for it
            raise MalformedMessageError(name)
        return message


OF_CALLERS: Final = Arrival(limit_seconds=MAX_MESSAGE_SECONDS)
"""Where the operator has set nothing else."""
OF_PROBES: Final = Arrival(limit_seconds=2.0, limit_bytes=16 * 1024)
"""Messages of callers whom nobody counts. Theirs are short, and travel with the headers."""


@contextlib.contextmanager
def _expiring(timeout: asyncio.Timeout, seconds: float) -> Iterator[None]:
    """Let `timeout` end what is waited for, but not what came while the loop was held up: that is taken first."""
    loop = asyncio.get_running_loop()
    expiry = loop.call_later(seconds, lambda: timeout.reschedule(loop.time()))
    try:
        yield
    finally:
        expiry.cancel()
