"""The asynchronous client: a thin layer over the generated stubs, which adds deadlines, limits and typed errors."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from mlxstream.calls import Calls
from mlxstream.connection import (
    READINESS_SERVICE,
    Tls,
    checked_targets,
    checked_timeout,
    checked_token,
    unary_method,
)
from mlxstream.durable import Durability
from mlxstream.errors import DeadlineExceededError, ErrorDetails, LocalReason, UnavailableError
from mlxstream.failures import error_of
from mlxstream.reader import EventReader
from mlxstream.requests import Messages, Prompt, chat_prompt, filled, generation_request
from mlxstream.results import FinishReason, Generation
from mlxstream.stream import AsyncTextStream
from mlxstream.v1.delivery_pb2 import DeliveryOptions
from mlxstream.v1.generation_pb2 import AbortRequest, AbortResponse, CompleteRequest, GenerateRequest
from mlxstream.v1.model_pb2 import (
    DetokenizeRequest,
    EstimateMemoryRequest,
    EstimateMemoryResponse,
    GetModelRequest,
    ListModelsRequest,
    ModelInfo,
    ModelSummary,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
)

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS = 600.0
READINESS_PAUSE_SECONDS = 0.1
HEALTH_TIMEOUT_SECONDS = 10.0


class AsyncClient:
    """Talks to one server. The connection is made by the first call and belongs to that call's event loop.

    Use it in `async with`, or call `close`. Calls may run side by side.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        balanced: bool | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Describe the connection; nothing is sent yet.

        Args:
            target: "HOST:PORT", "unix:PATH", or another target that gRPC knows; or a list of "IP:PORT".
            tls: Whom to trust and who to be; None means plain text.
            token: Bearer token, presented with every call.
            timeout_seconds: Deadline of every call that names none; None means no deadline.
            balanced: Whether calls go by turns to every server behind the target that says it serves, rather than all
                to one. None: with a list of targets.
            metadata: Sent with every call.

        Raises:
            ValueError: The target, the token or the deadline cannot be one.
        """
        self._calls = Calls(
            checked_targets(target),
            tls=tls,
            balanced=not isinstance(target, str) if balanced is None else balanced,
            timeout_seconds=timeout_seconds,
            metadata=(*metadata, *checked_token(token)),
        )
        self._readers: weakref.WeakSet[EventReader] = weakref.WeakSet()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every generation that is still running, and close the connection.

        Whoever reads one, and whoever calls later, gets a `GenerationCancelledError` with the reason "CLIENT_CLOSED".
        Durable generations do not end with it: the server is told of each, which takes two seconds at most.
        """
        for reader in tuple(self._readers):
            reader.close()
        await self._calls.settle()
        await self._calls.close()

    def stream(
        self,
        /,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        durable: bool | Durability = False,
        **options: Any,
    ) -> AsyncTextStream:
        """Generate, and give the text as it comes: `for text in client.stream("Once", max_tokens=20): ...`.

        Args:
            prompt: Text, a list of token ids, or a list of messages such as `{"role": "user", "content": "Hello"}`;
                `{"messages": [...], "tools": [...], "enable_thinking": True}` gives the chat template's settings too.
            model: Name of the model; "" means the served one.
            request_id: A name for `abort`; "" lets the server choose.
            delivery: Fields of the schema's `DeliveryOptions` by name, durations in seconds.
            timeout_seconds: Deadline of this call; None means the client's.
            durable: Whether the stream survives a lost connection and a server that restarts: it is resumed by itself,
                and gives every token once. A `Durability` says how, and who is told.
            options: Fields of the schema's `GenerateOptions` by name: `max_tokens` (512), `temperature` (0: the
                likeliest token), `top_p`, `top_k`, `min_p`, `seed`, `stop_sequences` (a list) and others. What is left
                out, or None, is the model's default; what a server cannot honour is an `UnsupportedError`.

        Returns:
            A stream that sends the request when it is first iterated over. Afterwards it knows `finish_reason`,
            `usage` and `stats`; leaving it early ends the generation.

        Raises:
            TypeError: An option has an unknown name, or a value of the wrong type.
            ValueError: A value does not fit its field.
            MlxStreamError: From the iteration: the generation failed.
        """
        facts = self._calls.facts(timeout_seconds)
        request = generation_request(
            GenerateRequest, prompt, options, delivery=delivery, model=model, request_id=request_id
        )
        if not durable and not request.delivery.durable:
            return self._stream(EventReader(self._calls, facts, request))
        request.delivery.durable = True
        request.request_id = request.request_id or uuid.uuid4().hex  # tells the server a repetition from a twin
        return self._stream(EventReader(self._calls, facts, request, _durability(durable)))

    def resume(
        self,
        /,
        generation_id: str,
        *,
        after_sequence: int = 0,
        timeout_seconds: float | None = None,
        durable: bool | Durability = True,
    ) -> AsyncTextStream:
        """Go on with a durable generation: what came after a message once more, then what follows.

        Args:
            generation_id: The server's id of it, from `started.generation_id`.
            after_sequence: The `sequence` of the last message that was received; 0 gives everything again.
            timeout_seconds: Deadline of this call; None means the client's.
            durable: Whether this stream survives too; see `stream`.

        Returns:
            A stream like that of `stream`.

        Raises:
            MlxStreamError: From the iteration: `NotFoundError` when the generation is unknown, `OutOfRangeError`
                when that point is not kept any more, `FailedPreconditionError` when another model is served,
                `DataLossError` when what was kept is damaged.
        """
        reader = EventReader(
            self._calls,
            self._calls.facts(timeout_seconds),
            GenerateRequest(),
            _durability(durable) if durable else Durability(patience_seconds=0.0),
            generation_id=generation_id,
            after_sequence=after_sequence,
        )
        return self._stream(reader)

    def _stream(self, reader: EventReader) -> AsyncTextStream:
        self._readers.add(reader)
        return AsyncTextStream(reader)

    async def generate(
        self,
        /,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Generation:
        """Generate, and give all of it at the end: `client.generate("Once", max_tokens=20).text`.

        Args:
            prompt: Text, a list of token ids, or a list of messages, as for `stream`.
            model: Name of the model; "" means the served one.
            request_id: A name for `abort`; "" lets the server choose.
            delivery: Fields of the schema's `DeliveryOptions` by name, durations in seconds.
            timeout_seconds: Deadline of this call; None means the client's.
            options: Fields of the schema's `GenerateOptions` by name, as for `stream`.

        Returns:
            The text, the tokens, why it ended, and the statistics.

        Raises:
            TypeError: An option has an unknown name, or a value of the wrong type.
            ValueError: A value does not fit its field.
            MlxStreamError: The generation failed.
        """
        if "durable" in options:
            raise TypeError("durable belongs to stream: an answer that comes at once cannot be gone on with")
        request = generation_request(
            CompleteRequest, prompt, options, delivery=delivery, model=model, request_id=request_id
        )
        response = await self._calls.answer(self._calls.connected().generations.Complete, request, timeout_seconds)
        return Generation(
            text=response.text,
            tokens=tuple(response.tokens),
            finish_reason=FinishReason.of(response.finished),
            matched_stop=response.finished.matched_stop,
            stats=response.finished.stats,
            started=response.started,
        )

    async def abort(self, *, request_id: str | None = None, generation_id: str | None = None) -> AbortResponse:
        """End a generation by one of its names. One that does not run (any more) is not an error."""
        request = AbortRequest(request_id=request_id, generation_id=generation_id)
        return await self._calls.abort(request)

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        request = TokenizeRequest(text=text, model=model, add_special_tokens=add_special_tokens)
        response = await self._calls.answer(self._calls.connected().models.Tokenize, request)
        return list(response.ids)

    async def detokenize(self, ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = filled(
            DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens), {"ids": ids}, "argument"
        )
        response = await self._calls.answer(self._calls.connected().models.Detokenize, request)
        return response.text

    async def render_chat(self, messages: Messages, *, model: str = "") -> RenderChatResponse:
        """The text and the token ids that `stream` would run for a conversation."""
        request = RenderChatRequest(chat=chat_prompt(messages), model=model)
        return await self._calls.answer(self._calls.connected().models.RenderChat, request)

    async def estimate_memory(
        self, *, prompt_tokens: int, max_tokens: int = 0, rows: int = 1, images: int = 0, model: str = ""
    ) -> EstimateMemoryResponse:
        """The memory that `rows` generations of this size would take at the same time, and whether they fit.

        The tokens of a prompt's `images` are among its `prompt_tokens`.
        """
        request = EstimateMemoryRequest(
            model=model, prompt_tokens=prompt_tokens, max_tokens=max_tokens, rows=rows, images=images
        )
        return await self._calls.answer(self._calls.connected().models.EstimateMemory, request)

    async def model(self, name: str = "") -> ModelInfo:
        """What is known about a model; "" means the served one."""
        response = await self._calls.answer(self._calls.connected().models.GetModel, GetModelRequest(model=name))
        return response.model

    async def models(self) -> list[ModelSummary]:
        """All models that can be asked for, every page."""
        found: list[ModelSummary] = []
        request = ListModelsRequest()
        while True:
            response = await self._calls.answer(self._calls.connected().models.ListModels, request)
            found += response.models
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def call(self, method: str, request: Message) -> Any:
        """Make any call of the schema that has one answer: `client.call("AdminService/GetLoad", GetLoadRequest())`.

        Raises:
            ValueError: The schema has no such call, or it streams.
            MlxStreamError: It failed.
        """
        channel = self._calls.connected().channel
        path, answer_class = unary_method(method)
        stub = channel.unary_unary(path, type(request).SerializeToString, answer_class.FromString)
        return await self._calls.answer(stub, request)

    async def health(self, service: str = READINESS_SERVICE) -> str:
        """Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness."""
        request = HealthCheckRequest(service=service)
        response = await self._calls.answer(self._calls.connected().health.Check, request, HEALTH_TIMEOUT_SECONDS)
        return _status_name(response)

    async def watch_health(self, service: str = READINESS_SERVICE) -> AsyncGenerator[str, None]:
        """The status now, and again whenever it changes: `for status in client.watch_health(): ...`.

        It ends with an error only, when the server does; a service that is not known is "SERVICE_UNKNOWN".

        Raises:
            MlxStreamError: From the iteration: the server went away.
        """
        call = self._calls.connected().health.Watch(HealthCheckRequest(service=service), metadata=self._calls.metadata)
        try:
            async for response in call:
                yield _status_name(response)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._calls.facts(None)) from error
        finally:
            call.cancel()

    async def wait_ready(self, *, timeout_seconds: float = 60.0) -> None:
        """Wait until the server takes generations; it need not be reachable yet.

        Raises:
            UnavailableError: It was not ready in time.
        """
        try:
            async with asyncio.timeout(checked_timeout(timeout_seconds)):
                while not await self._is_ready():  # noqa: ASYNC110 - the state is the server's
                    await asyncio.sleep(READINESS_PAUSE_SECONDS)
        except TimeoutError:
            message = f"{self._calls.target} was not ready within {timeout_seconds:g} s"
            details = ErrorDetails(reason=LocalReason.NOT_READY)
            raise UnavailableError(message, code=grpc.StatusCode.UNAVAILABLE, details=details) from None

    async def _is_ready(self) -> bool:
        try:
            return await self.health() == "SERVING"
        except (UnavailableError, DeadlineExceededError):
            return False


def _status_name(response: HealthCheckResponse) -> str:
    """The status by name; what this client does not know counts as unknown."""
    known = HealthCheckResponse.ServingStatus
    return known.Name(response.status if response.status in known.values() else HealthCheckResponse.UNKNOWN)


def _durability(durable: bool | Durability) -> Durability:
    return durable if isinstance(durable, Durability) else Durability()
