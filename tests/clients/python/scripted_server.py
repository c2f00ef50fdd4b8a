"""A real gRPC server whose answers the test writes: the peer of the client's tests. No engine is behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from mlxstream.sync import BackgroundLoop
from mlxstream.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from mlxstream.v1.event_pb2 import Finished, Heartbeat, Started, TokenChunk
from mlxstream.v1.generation_pb2 import GenerateRequest, GenerateResponse
from mlxstream.v1.result_pb2 import FinishReason, GeneratedToken, GenerateStats

Context = Any
Behaviour = Callable[[GenerateRequest, Context], Awaitable[None]]
READINESS_SERVICE = "mlxstream.v1.GenerationService"


class Events:
    """Writes one stream's messages and counts them."""

    def __init__(self, context: Context, *, tokens: int = 0) -> None:
        """So many `tokens` were said by an earlier call."""
        self._context = context
        self._sequence = 0
        self._tokens = tokens

    async def send(self, **event: Any) -> None:
        self._sequence += 1
        await self._context.write(GenerateResponse(sequence=self._sequence, **event))

    async def start(self, prompt_tokens: int = 3) -> None:
        await self.send(started=Started(generation_id="g1", request_id="r1", prompt_tokens=prompt_tokens))

    async def progress(self, prefilled_tokens: int, prompt_tokens: int) -> None:
        await self.send(heartbeat=Heartbeat(prefilled_tokens=prefilled_tokens, prompt_tokens=prompt_tokens))

    async def text(self, text: str) -> None:
        token = GeneratedToken(token=100 + self._tokens, index=self._tokens)
        self._tokens += 1
        await self.send(chunk=TokenChunk(text=text, tokens=[token]))

    async def finish(self, reason: FinishReason = FinishReason.FINISH_REASON_STOP, **fields: Any) -> None:
        stats = GenerateStats(prompt_tokens=3, generated_tokens=self._tokens, decode_tps=5.0, prefill_tps=7.0)
        await self.send(finished=Finished(finish_reason=reason, stats=stats, **fields))


def answer(*pieces: str) -> Behaviour:
    """The stream that says `pieces` and stops."""

    async def behave(_request: GenerateRequest, context: Context) -> None:
        events = Events(context)
        await events.start()
        for piece in pieces:
            await events.text(piece)
        await events.finish()

    return behave


async def endless(_request: GenerateRequest, context: Context) -> None:
    """A stream that never ends by itself."""
    events = Events(context)
    await events.start()
    while True:
        await events.text("more ")
        await asyncio.sleep(0.005)


async def silent(_request: GenerateRequest, _context: Context) -> None:
    """A request that is taken up and never answered."""
    await asyncio.Event().wait()


async def abort(context: Context, code: grpc.StatusCode, message: str, *details: Message) -> None:
    """End the call with a rich status."""
    status = Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(code, message)


class ScriptedGenerations(generation_pb2_grpc.GenerationServiceServicer):
    """Runs the behaviour, and records what it saw. `cancelled` is set when a call was cancelled from outside."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[GenerateRequest] = []
        self.resumes: list[generation_pb2.ResumeRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.deadlines_seconds: list[float | None] = []
        self.cancelled = asyncio.Event()
        self.running = 0

    async def Generate(self, request: GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines_seconds.append(context.time_remaining())
        self.running += 1
        try:
            await self.behaviour(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def Resume(self, request: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        self.resumes.append(request)
        await self.behaviour(GenerateRequest(), context)

    async def Complete(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        recorder = Recorder()
        await self.Generate(request, recorder_context(context, recorder))
        return recorder.response

    async def Abort(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        known = request.request_id == "r1"
        status = generation_pb2.ABORT_STATUS_ABORTED if known else generation_pb2.ABORT_STATUS_NOT_RUNNING
        return generation_pb2.AbortResponse(status=status)


class Recorder:
    """Gathers the messages of a stream into the answer of Complete."""

    def __init__(self) -> None:
        self.response = generation_pb2.CompleteResponse()

    async def write(self, message: GenerateResponse) -> None:
        event = message.WhichOneof("event")
        if event == "started":
            self.response.started.CopyFrom(message.started)
        elif event == "chunk":
            self.response.text += message.chunk.text
            self.response.tokens.extend(message.chunk.tokens)
        elif event == "finished":
            self.response.finished.CopyFrom(message.finished)


def recorder_context(context: Context, recorder: Recorder) -> Context:
    """`context` with its writes turned into the recorder's."""

    class Recording:
        write = recorder.write

        def __getattr__(self, name: str) -> Any:
            return getattr(context, name)

    return Recording()


class ScriptedModels(model_pb2_grpc.ModelServiceServicer):
    """One model that spells: a token is a character's number."""

    async def GetModel(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        if request.model not in {"", "tiny"}:
            await abort(context, grpc.StatusCode.NOT_FOUND, f"no model named {request.model!r}")
        return model_pb2.GetModelResponse(model=model_pb2.ModelInfo(name="tiny", has_chat_template=True))

    async def ListModels(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        names = ["a", "b", "c"]
        start = int(request.page_token or 0)
        following = str(start + 1) if start + 1 < len(names) else ""
        summary = model_pb2.ModelSummary(name=names[start])
        return model_pb2.ListModelsResponse(models=[summary], next_page_token=following)

    async def Tokenize(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        return model_pb2.TokenizeResponse(ids=[ord(character) for character in request.text])

    async def Detokenize(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        return model_pb2.DetokenizeResponse(text="".join(chr(token) for token in request.ids))

    async def RenderChat(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        turns = [f"{turn.role}: {''.join(part.text for part in turn.content)}" for turn in request.chat.messages]
        return model_pb2.RenderChatResponse(text="\n".join(turns))

    async def EstimateMemory(self, request: Any, context: Context) -> Any:  # type: ignore[override]  # noqa: N802
        tokens = request.prompt_tokens + request.max_tokens
        return model_pb2.EstimateMemoryResponse(kv_bytes=request.rows * tokens, fits=True)


class ScriptedServer:
    """A running server: where it listens, what it saw, and its health."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.generations = ScriptedGenerations(behaviour)
        self.health = health.aio.HealthServicer()
        self.server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.generations, self.server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ScriptedModels(), self.server)
        add_HealthServicer_to_server(self.health, self.server)
        self.target = ""

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        port = self.server.add_insecure_port(listen)
        self.target = listen if listen.startswith("unix:") else f"127.0.0.1:{port}"
        await self.health.set(READINESS_SERVICE, HealthCheckResponse.SERVING)
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(None)


class ThreadedServer:
    """A scripted server on a loop of its own, so that the test's thread may block."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._loop = BackgroundLoop(self._stop)
        self.scripted = self._loop.run(self._start())

    async def _start(self) -> ScriptedServer:
        server = ScriptedServer(self._behaviour)
        await server.start()
        return server

    async def _stop(self) -> None:
        await self.scripted.stop()

    def wait_cancelled(self) -> None:
        async def wait() -> None:
            await self.scripted.generations.cancelled.wait()

        self._loop.run(wait())

    def wait_running(self, count: int) -> None:
        self._loop.run(eventually(lambda: self.scripted.generations.running == count))

    def close(self) -> None:
        self._loop.close()


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour, listen: str = "127.0.0.1:0") -> AsyncIterator[ScriptedServer]:
    """A server on the running event loop."""
    server = ScriptedServer(behaviour)
    await server.start(listen)
    try:
        yield server
    finally:
        await server.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - any condition of the test
        await asyncio.sleep(0.005)
