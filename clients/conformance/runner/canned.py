"""A server that no release is: one from the future, and one that breaks off. It answers with the bytes it was given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from mlxstream.v1 import event_pb2, generation_pb2, options_pb2, result_pb2

GENERATE = "/mlxstream.v1.GenerationService/Generate"
# Field 100, length-delimited, "news": an arm of the stream that is not invented yet. 802 is (100 << 3 | 2).
UNKNOWN_ARM = bytes([0xA2, 0x06, 4]) + b"news"
UNKNOWN_REASON = 77


def _event(sequence: int, **event: Any) -> bytes:
    return generation_pb2.GenerateResponse(sequence=sequence, **event).SerializeToString()


OPTIONS = options_pb2.GenerateOptions(temperature=0, top_p=0, top_k=0, max_tokens=1, seed=1)
STARTED = event_pb2.Started(generation_id="g", request_id="r", model="canned", prompt_tokens=1, options=OPTIONS)
TOKEN = result_pb2.GeneratedToken(token=7, index=0)


def from_the_future() -> list[bytes]:
    """An unknown event, an unknown field in a known one, and an unknown reason for the end."""
    finished = event_pb2.Finished(stats=result_pb2.GenerateStats(prompt_tokens=1, generated_tokens=1))
    end = finished.SerializeToString() + bytes([0x08, UNKNOWN_REASON])
    chunk = _event(3, chunk=event_pb2.TokenChunk(tokens=[TOKEN], text="hello"))
    return [
        _event(1, started=STARTED),
        generation_pb2.GenerateResponse(sequence=2).SerializeToString() + UNKNOWN_ARM,
        chunk + bytes([0xA8, 0x06, 1]),
        generation_pb2.GenerateResponse(sequence=4, finished=event_pb2.Finished.FromString(end)).SerializeToString(),
    ]


def broken_off() -> list[bytes]:
    """A stream that ends with OK and without its last event."""
    return [_event(1, started=STARTED), _event(2, chunk=event_pb2.TokenChunk(tokens=[TOKEN], text="hello"))]


class CannedServer:
    """Serves canned streams in the runner's own process."""

    def __init__(self) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Canned(),))
        self.target = ""

    async def start(self) -> None:
        """Listen on a free port."""
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """End."""
        await self._server.stop(None)


class _Canned(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method != GENERATE:
            return None
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(_generate)
        return handler


async def _generate(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    text = generation_pb2.GenerateRequest.FromString(request).text.text
    messages: Sequence[bytes] = broken_off() if "[[cut]]" in text else from_the_future()
    for message in messages:
        yield message
