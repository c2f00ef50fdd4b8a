"""A TCP relay between a client and a server that can break the way connections break: reset, or silent for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

ABORT = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST


class Relay:
    """Carries bytes both ways until it is told not to."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._upstream: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    def freeze(self) -> None:
        """Carry nothing any more, and tell nobody: what a machine does that has lost its power."""
        self._flowing.clear()

    def reset(self) -> None:
        """Break every connection to the server with RST."""
        for writer in self._upstream:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._upstream.append(up_writer)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        for task in list(self._pumps):
            task.cancel()
        for writer in self._upstream:
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def relaying(target_port: int) -> AsyncIterator[Relay]:
    relay = Relay(target_port)
    server = await asyncio.start_server(relay.carry, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        await relay.close()
        server.close()
