"""The asynchronous client: a thin layer over the generated stubs, which adds deadlines, limits and typed errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from mlxstream.errors import GenerationCancelledError, UnavailableError, error_of
from mlxstream.requests import Messages, Prompt, chat_prompt, generation_request
from mlxstream.results import FinishReason, Generation
from mlxstream.stream import AsyncTextStream, Call
from mlxstream.v1.delivery_pb2 import DeliveryOptions
from mlxstream.v1.generation_pb2 import AbortRequest, AbortResponse, CompleteRequest, GenerateRequest
from mlxstream.v1.generation_pb2_grpc import GenerationServiceStub
from mlxstream.v1.model_pb2 import (
    DetokenizeRequest,
    GetModelRequest,
    ListModelsRequest,
    ModelInfo,
    ModelSummary,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
)
from mlxstream.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:  # names that exist for type checkers alone
    from mlxstream.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from mlxstream.v1.model_pb2_grpc import ModelServiceAsyncStub

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS = 600.0
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
READINESS_SERVICE = "mlxstream.v1.GenerationService"
READINESS_PAUSE_SECONDS = 0.1
HEALTH_TIMEOUT_SECONDS = 10.0

# A call is tried again only while the server has not taken it up: once the first event came, never.
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "mlxstream.v1.GenerationService"}, {"service": "mlxstream.v1.ModelService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
# Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
)
LOOPBACK_PREFIXES = ("127.", "localhost:", "[::1]:", "unix:")

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel and its stubs, bound to the event loop on which they were made."""

    loop: asyncio.AbstractEventLoop
    channel: grpc.aio.Channel
    generations: GenerationServiceAsyncStub
    models: ModelServiceAsyncStub
    health_check: grpc.aio.UnaryUnaryMultiCallable[HealthCheckRequest, HealthCheckResponse]


def connect(target: str, credentials: grpc.ChannelCredentials | None) -> Connection:
    """Make a channel on the running event loop; the network is touched by the first call."""
    options = CHANNEL_OPTIONS
    if target.startswith(LOOPBACK_PREFIXES):
        options = (*options, ("grpc.enable_http_proxy", 0))
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    return Connection(
        loop=asyncio.get_running_loop(),
        channel=channel,
        generations=GenerationServiceStub(channel),
        models=ModelServiceStub(channel),
        health_check=HealthStub(channel).Check,  # type: ignore[attr-defined]
    )


class AsyncClient:
    """Talks to one server. The connection is made by the first call and belongs to that call's event loop.

    Use it in `async with`, or call `close`. Calls may run side by side.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Describe the connection; nothing is sent yet.

        Args:
            target: "HOST:PORT", "unix:PATH", or another target that gRPC knows.
            timeout_seconds: Deadline of every call that names none; None means no deadline.
            credentials: TLS credentials; None means plain text.
            metadata: Sent with every call, such as an authorization.
        """
        self._target = target
        self._timeout_seconds = timeout_seconds
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._connection: Connection | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end every generation that is still running on it."""
        self._closed = True
        if self._connection is not None:
            await self._connection.channel.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> AsyncTextStream:
        """Generate, and give the text as it comes.

        Args:
            prompt: Text, token ids, or messages such as `{"role": "user", "content": "Hello"}`.
            model: Name of the model; "" means the served one.
            request_id: A name for `abort`; "" lets the server choose.
            delivery: Fields of the schema's `DeliveryOptions` by name, durations in seconds.
            timeout_seconds: Deadline of this call; None means the client's.
            options: Fields of the schema's `GenerateOptions` by name.

        Raises:
            TypeError: An option has an unknown name or a value of the wrong type.
            ValueError: A value does not fit its field.
        """
        request = generation_request(
            GenerateRequest, prompt, options, delivery=delivery, model=model, request_id=request_id
        )

        def open_call() -> Call:
            return self._connected().generations.Generate(
                request, timeout=self._deadline(timeout_seconds), metadata=self._metadata
            )

        return AsyncTextStream(open_call)

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Generation:
        """Generate, and give all of it at the end. Arguments and errors are those of `stream`.

        Raises:
            MlxStreamError: The generation failed.
        """
        request = generation_request(
            CompleteRequest, prompt, options, delivery=delivery, model=model, request_id=request_id
        )
        response = await self._call(self._connected().generations.Complete, request, timeout_seconds)
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
        return await self._call(self._connected().generations.Abort, request)

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        request = TokenizeRequest(text=text, model=model, add_special_tokens=add_special_tokens)
        response = await self._call(self._connected().models.Tokenize, request)
        return list(response.ids)

    async def detokenize(self, ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = DetokenizeRequest(ids=ids, model=model, skip_special_tokens=skip_special_tokens)
        response = await self._call(self._connected().models.Detokenize, request)
        return response.text

    async def render_chat(self, messages: Messages, *, model: str = "") -> RenderChatResponse:
        """The text and the token ids that `stream` would run for a conversation."""
        request = RenderChatRequest(chat=chat_prompt(messages), model=model)
        return await self._call(self._connected().models.RenderChat, request)

    async def model(self, name: str = "") -> ModelInfo:
        """What is known about a model; "" means the served one."""
        response = await self._call(self._connected().models.GetModel, GetModelRequest(model=name))
        return response.model

    async def models(self) -> list[ModelSummary]:
        """All models that can be asked for, every page."""
        found: list[ModelSummary] = []
        request = ListModelsRequest()
        while True:
            response = await self._call(self._connected().models.ListModels, request)
            found += response.models
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def health(self, service: str = READINESS_SERVICE) -> str:
        """Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness."""
        request = HealthCheckRequest(service=service)
        response = await self._call(self._connected().health_check, request, HEALTH_TIMEOUT_SECONDS)
        return HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_ready(self, *, timeout_seconds: float = 60.0) -> None:
        """Wait until the server takes generations; it need not be reachable yet.

        Raises:
            UnavailableError: It was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while not await self._is_ready():  # noqa: ASYNC110 - the state is the server's
                    await asyncio.sleep(READINESS_PAUSE_SECONDS)
        except TimeoutError:
            message = f"{self._target} was not ready within {timeout_seconds:g} s"
            raise UnavailableError(message, code=grpc.StatusCode.UNAVAILABLE) from None

    async def _is_ready(self) -> bool:
        try:
            return await self.health() == "SERVING"
        except UnavailableError:
            return False

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_seconds: float | None = None,
    ) -> Response:
        """Make a call with one answer, and turn its failure into a typed error."""
        try:
            return await method(request, timeout=self._deadline(timeout_seconds), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise GenerationCancelledError("the client was closed", code=grpc.StatusCode.CANCELLED) from None

    def _deadline(self, timeout_seconds: float | None) -> float | None:
        return self._timeout_seconds if timeout_seconds is None else timeout_seconds

    def _connected(self) -> Connection:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._connection is None:
            self._connection = connect(self._target, self._credentials)
        if self._connection.loop is not asyncio.get_running_loop():
            raise RuntimeError("the client belongs to another event loop: make one per loop")
        return self._connection
