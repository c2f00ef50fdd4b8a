"""The contestants as their clients see them: send a prompt, note when its tokens arrive.

One that can `stream` is a server with a network in between; all can `run` several requests at once. Each is a child
process, paused while it is not its turn.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from benchmarks.serving.timeline import Timeline
from mlxstream import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from benchmarks.serving.processes import Child

LOOPBACK = "127.0.0.1"
START_SECONDS = 180.0
LOAD_SECONDS = 400.0
SETTLE_SECONDS = 0.1
POLL_SECONDS = 0.02

Arrival = tuple[float, int]


class Contestant(Protocol):
    """Anything that can be given a load."""

    name: str
    child: Child

    async def ready(self) -> None:
        """Return once it answers."""

    async def run(self, prompts: Sequence[str], max_tokens: int) -> list[Timeline]:
        """Send all prompts at once and wait for their ends."""


class Server:
    """A contestant behind a network; subclasses know its protocol."""

    def __init__(self, name: str, child: Child, port: int) -> None:
        """`child` listens, or will, on the loopback `port`."""
        self.name = name
        self.child = child
        self.port = port

    async def ready(self) -> None:
        """Wait for the first answer; trying anew as long as nobody listens."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.child.require_running()
            try:
                await self.run(["Hello"], 1)
            except (OSError, grpc.RpcError, asyncio.IncompleteReadError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)
            else:
                return

    def stream(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrival, None]:
        """Send one prompt and give what arrives; leaving the iteration leaves the server."""
        raise NotImplementedError

    async def run(self, prompts: Sequence[str], max_tokens: int) -> list[Timeline]:
        """Send all prompts at once and wait for their ends."""
        async with asyncio.timeout(LOAD_SECONDS):
            return await asyncio.gather(*(self._follow(prompt, max_tokens) for prompt in prompts))

    async def _follow(self, prompt: str, max_tokens: int) -> Timeline:
        timeline = Timeline(sent_at=time.monotonic())
        async for arrival in self.stream(prompt, max_tokens):
            timeline.arrivals.append(arrival)
        if timeline.tokens != max_tokens:
            raise RuntimeError(f"{self.name} gave {timeline.tokens} tokens of {max_tokens}")
        return timeline


class MlxStreamServer(Server):
    """We, through our own client."""

    def __init__(self, name: str, child: Child, port: int) -> None:
        """See `Server`."""
        super().__init__(name, child, port)
        self.client: AsyncClient | None = None

    async def ready(self) -> None:
        """Wait until health says so."""
        async with AsyncClient(f"{LOOPBACK}:{self.port}") as client:
            await client.wait_ready(timeout_seconds=START_SECONDS)

    async def run(self, prompts: Sequence[str], max_tokens: int) -> list[Timeline]:
        """Send all prompts over one fresh connection."""
        async with self.connected():
            return await super().run(prompts, max_tokens)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncClient]:
        """A connection that `stream` uses inside the block."""
        async with AsyncClient(f"{LOOPBACK}:{self.port}") as self.client:
            await self.client.health()
            yield self.client
        self.client = None

    async def stream(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrival, None]:
        """See `Server`."""
        if self.client is None:
            raise RuntimeError("not connected")
        stream = self.client.stream(prompt, max_tokens=max_tokens, temperature=0.0, eos_token_ids=[])
        async with stream:
            async for event in stream.events():
                if event.chunk.tokens:
                    yield time.monotonic(), len(event.chunk.tokens)


class MlxLmServer(Server):
    """mlx_lm.server, by server-sent events."""

    async def stream(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrival, None]:
        """See `Server`. It sends text, and the number of tokens at the end: the ones it held back count as the last."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        try:
            writer.write(_http_request(prompt, max_tokens))
            seen = 0
            arrived_at = 0.0
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    if line.startswith(b"HTTP/") and b" 200 " not in line:
                        raise RuntimeError(f"{self.name} answered {line.decode().strip()}")
                    continue
                message = json.loads(line[6:])
                if any(choice.get("text") for choice in message["choices"]):
                    seen, arrived_at = seen + 1, time.monotonic()
                    yield arrived_at, 1
                if held_back := (message.get("usage") or {}).get("completion_tokens", seen) - seen:
                    yield arrived_at or time.monotonic(), held_back
        finally:
            writer.close()


class SmgServer(Server):
    """The smg MLX servicer, by its own protocol; it takes token ids alone."""

    def __init__(self, name: str, child: Child, port: int, encode: Any) -> None:
        """`encode` turns a prompt into token ids."""
        super().__init__(name, child, port)
        self._encode = encode
        self._serial = 0

    async def stream(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrival, None]:
        """See `Server`."""
        from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc  # type: ignore[import-not-found]

        self._serial += 1
        request = mlx_engine_pb2.GenerateRequest(
            request_id=f"{self.port}-{self._serial}-{time.monotonic_ns()}",
            tokenized=mlx_engine_pb2.TokenizedInput(input_ids=self._encode(prompt)),
            sampling_params=mlx_engine_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            stream=True,
        )
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"{LOOPBACK}:{self.port}", options=options) as channel:
            async for response in mlx_engine_pb2_grpc.MlxEngineStub(channel).Generate(request):
                if response.HasField("chunk"):
                    yield time.monotonic(), len(response.chunk.token_ids)


class Worker:
    """A contestant without a network, driven by JSON lines over pipes."""

    def __init__(self, name: str, child: Child) -> None:
        """`child` speaks."""
        self.name = name
        self.child = child

    async def ready(self) -> None:
        """Wait for its first line."""
        line = await self._read()
        if line != "ready":
            raise RuntimeError(f"{self.name} said {line!r} instead of being ready")

    async def run(self, prompts: Sequence[str], max_tokens: int) -> list[Timeline]:
        """Send a load and wait for its timelines."""
        message = json.dumps({"prompts": list(prompts), "max_tokens": max_tokens}) + "\n"
        self.child.input.write(message.encode())
        self.child.input.flush()
        timelines = [Timeline.of_message(timeline) for timeline in json.loads(await self._read())]
        if any(timeline.tokens != max_tokens for timeline in timelines):
            raise RuntimeError(f"{self.name} gave {[timeline.tokens for timeline in timelines]} of {max_tokens} tokens")
        return timelines

    async def _read(self) -> str:
        async with asyncio.timeout(LOAD_SECONDS):
            line = await asyncio.to_thread(self.child.output.readline)
        if not line:
            await asyncio.sleep(SETTLE_SECONDS)
            self.child.require_running()
            raise RuntimeError(f"{self.name} closed its output")
        return line.decode().strip()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def _http_request(prompt: str, max_tokens: int) -> bytes:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
    content = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {LOOPBACK}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
