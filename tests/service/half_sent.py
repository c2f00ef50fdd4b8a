"""An HTTP/2 client that sends what no library would: the headers of a call, and half of its message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END_HEADERS, ACKNOWLEDGED = 4, 1


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def plain_headers(pairs: dict[str, str]) -> bytes:
    """HPACK without its tables: every name and value as it is, each shorter than 127 bytes."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in pairs.items()
    )


class HalfSender:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = -1

    def begin(self, path: str, *, announced_bytes: int = 1000, sent: bytes = b"") -> None:
        """Begin a call: a message of so many bytes, of which `sent` comes and then nothing."""
        self._stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        message = b"\0" + announced_bytes.to_bytes(4, "big") + sent
        self._writer.write(
            frame(HEADERS, plain_headers(headers), flags=END_HEADERS, stream=self._stream)
            + frame(DATA, message, stream=self._stream)
        )

    async def ending(self) -> bytes:
        """The headers with which the server ends a call; its pings are answered meanwhile."""
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, payload = head[3], head[4], await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGED:
                self._writer.write(frame(kind, payload if kind == PING else b"", flags=ACKNOWLEDGED))
            if kind == HEADERS and b"grpc-status" in payload:
                return payload
            assert kind != RESET, "ended without a word"


@contextlib.asynccontextmanager
async def half_sender(port: int) -> AsyncIterator[HalfSender]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS))
    try:
        async with asyncio.timeout(60):
            yield HalfSender(reader, writer)
    finally:
        writer.close()
