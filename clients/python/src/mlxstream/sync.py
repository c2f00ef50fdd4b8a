"""The client for plain threads: the asynchronous one, run on an event loop of its own in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS, READINESS_SERVICE, AsyncClient
from mlxstream.errors import GenerationCancelledError
from mlxstream.requests import Messages, Prompt
from mlxstream.results import FinishReason, Generation, Usage
from mlxstream.stream import AsyncTextStream, Item, Iteration
from mlxstream.v1.delivery_pb2 import DeliveryOptions
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import AbortResponse, GenerateResponse
from mlxstream.v1.model_pb2 import ModelInfo, ModelSummary, RenderChatResponse
from mlxstream.v1.result_pb2 import GenerateStats

Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop in a thread of its own. `close` ends both; so does dropping the last reference."""

    def __init__(self, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread; `at_end` is awaited on the loop before it closes."""
        ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        thread = threading.Thread(target=_run_loop, args=(ready, at_end), name="mlxstream-client", daemon=True)
        thread.start()
        self._loop, closing = ready.result()
        self._thread = thread
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_loop, self._loop, closing, thread)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the loop and wait for its result. An interrupted wait cancels it."""
        try:
            future = self._submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise GenerationCancelledError("the client was closed", code=grpc.StatusCode.CANCELLED) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and its thread; more than once is harmless."""
        with self._lock:
            self._finalizer()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client would wait for itself")
        with self._lock:  # what is submitted before the end is ended with the rest; afterwards nothing is
            if not self._finalizer.alive:
                raise RuntimeError("the client is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def _run_loop(
    ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
    at_end: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    async def live() -> None:
        loop, closing = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_ignore_shared_poller)
        ready.set_result((loop, closing))
        await closing.wait()
        await at_end()

    asyncio.run(live())


def _end_loop(loop: asyncio.AbstractEventLoop, closing: asyncio.Event, thread: threading.Thread) -> None:
    if loop.is_closed():
        return
    loop.call_soon_threadsafe(closing.set)
    if threading.current_thread() is not thread:
        thread.join()


def _ignore_shared_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of the process for every event; the loops that come late find nothing, harmlessly."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


class SyncIteration(Iterator[Item], Generic[Item]):
    """Walks an asynchronous iteration from a plain thread. Dropping it ends the generation."""

    def __init__(self, iteration: Iteration[Item], background: BackgroundLoop) -> None:
        self._iteration = iteration
        self._background = background

    def __next__(self) -> Item:
        if (item := self._background.run(self._iteration.advance())) is None:
            raise StopIteration
        return item


class TextStream:
    """One generation. Iterate over it for its text, or over `events()` for everything.

    The request is sent when the iteration begins. Leaving a loop early, or the `with` block, ends the generation.
    """

    def __init__(self, stream: AsyncTextStream, background: BackgroundLoop) -> None:
        self._stream = stream
        self._background = background

    def __iter__(self) -> SyncIteration[str]:
        """The text, piece by piece: joined, they are the completion."""
        return SyncIteration(aiter(self._stream), self._background)

    def events(self) -> SyncIteration[GenerateResponse]:
        """Every message of the stream, the last one included."""
        return SyncIteration(self._stream.events(), self._background)

    def cancel(self) -> None:
        """End the generation now, from any thread. An iteration that is under way stops without an error."""
        self._stream.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def started(self) -> Started | None:
        """See `AsyncTextStream.started`."""
        return self._stream.started

    @property
    def finished(self) -> Finished | None:
        """See `AsyncTextStream.finished`."""
        return self._stream.finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `AsyncTextStream.finish_reason`."""
        return self._stream.finish_reason

    @property
    def stats(self) -> GenerateStats | None:
        """See `AsyncTextStream.stats`."""
        return self._stream.stats

    @property
    def usage(self) -> Usage:
        """See `AsyncTextStream.usage`."""
        return self._stream.usage


class Client:
    """Talks to one server, from any thread. Use it in a `with` block, or call `close`.

    Arguments, results and errors are those of `AsyncClient`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """See `AsyncClient`; one background thread is started."""
        self._client = AsyncClient(target, timeout_seconds=timeout_seconds, credentials=credentials, metadata=metadata)
        self._background = BackgroundLoop(self._client.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, end every generation that is still running on it, and end the thread."""
        self._background.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> TextStream:
        """See `AsyncClient.stream`."""
        stream = self._client.stream(
            prompt, model=model, request_id=request_id, delivery=delivery, timeout_seconds=timeout_seconds, **options
        )
        return TextStream(stream, self._background)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        delivery: Mapping[str, Any] | DeliveryOptions | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Generation:
        """See `AsyncClient.generate`."""
        return self._background.run(
            self._client.generate(
                prompt,
                model=model,
                request_id=request_id,
                delivery=delivery,
                timeout_seconds=timeout_seconds,
                **options,
            )
        )

    def abort(self, *, request_id: str | None = None, generation_id: str | None = None) -> AbortResponse:
        """See `AsyncClient.abort`."""
        return self._background.run(self._client.abort(request_id=request_id, generation_id=generation_id))

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """See `AsyncClient.tokenize`."""
        return self._background.run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """See `AsyncClient.detokenize`."""
        return self._background.run(self._client.detokenize(ids, model=model, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Messages, *, model: str = "") -> RenderChatResponse:
        """See `AsyncClient.render_chat`."""
        return self._background.run(self._client.render_chat(messages, model=model))

    def model(self, name: str = "") -> ModelInfo:
        """See `AsyncClient.model`."""
        return self._background.run(self._client.model(name))

    def models(self) -> list[ModelSummary]:
        """See `AsyncClient.models`."""
        return self._background.run(self._client.models())

    def health(self, service: str = READINESS_SERVICE) -> str:
        """See `AsyncClient.health`."""
        return self._background.run(self._client.health(service))

    def wait_ready(self, *, timeout_seconds: float = 60.0) -> None:
        """See `AsyncClient.wait_ready`."""
        self._background.run(self._client.wait_ready(timeout_seconds=timeout_seconds))
