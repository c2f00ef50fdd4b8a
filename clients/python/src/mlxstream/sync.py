"""The client for plain threads: the asynchronous one, run on an event loop of its own in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS, READINESS_SERVICE, AsyncClient
from mlxstream.failures import client_was_closed
from mlxstream.requests import Messages, Prompt
from mlxstream.results import FinishReason, Generation, Usage
from mlxstream.stream import AsyncTextStream, Item, Iteration
from mlxstream.v1.delivery_pb2 import DeliveryOptions
from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.generation_pb2 import AbortResponse, GenerateResponse
from mlxstream.v1.model_pb2 import EstimateMemoryResponse, ModelInfo, ModelSummary, RenderChatResponse
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
            with contextlib.suppress(RuntimeError, ValueError):  # an interrupt may come when the loop has it already
                work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise client_was_closed() from None
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

    def __repr__(self) -> str:
        return repr(self._stream).replace("<Async", "<", 1)

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
        """The first event; None before it."""
        return self._stream.started

    @property
    def finished(self) -> Finished | None:
        """The last event; None before it, and when the generation was cancelled from here."""
        return self._stream.finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None before it has."""
        return self._stream.finish_reason

    @property
    def stats(self) -> GenerateStats | None:
        """The account of the whole generation; None before its end."""
        return self._stream.stats

    @property
    def usage(self) -> Usage:
        """The tokens used so far, by what has arrived; final once the generation has ended."""
        return self._stream.usage


class Client:
    """Talks to one server, from any thread. Use it in a `with` block, or call `close`.

    Arguments, results and errors are those of `AsyncClient`, whose twin it is.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Describe the connection, and start the thread that will hold it; nothing is sent yet.

        Args:
            target: "HOST:PORT", "unix:PATH", or another target that gRPC knows.
            timeout_seconds: Deadline of every call that names none; None means no deadline.
            credentials: TLS credentials; None means plain text.
            metadata: Sent with every call, such as an authorization.

        Raises:
            ValueError: The target or the deadline cannot be one.
        """
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
        """Generate, and give the text as it comes: `for text in client.stream("Once", max_tokens=20): ...`.

        Args:
            prompt: Text, a list of token ids, or a list of messages such as `{"role": "user", "content": "Hello"}`;
                `{"messages": [...], "tools": [...], "enable_thinking": True}` gives the chat template's settings too.
            model: Name of the model; "" means the served one.
            request_id: A name for `abort`; "" lets the server choose.
            delivery: Fields of the schema's `DeliveryOptions` by name, durations in seconds.
            timeout_seconds: Deadline of this call; None means the client's.
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
        """End a generation by one of its names. One that does not run (any more) is not an error."""
        return self._background.run(self._client.abort(request_id=request_id, generation_id=generation_id))

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._background.run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._background.run(self._client.detokenize(ids, model=model, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Messages, *, model: str = "") -> RenderChatResponse:
        """The text and the token ids that `stream` would run for a conversation."""
        return self._background.run(self._client.render_chat(messages, model=model))

    def estimate_memory(
        self, *, prompt_tokens: int, max_tokens: int = 0, rows: int = 1, model: str = ""
    ) -> EstimateMemoryResponse:
        """The memory that `rows` generations of this size would take at the same time, and whether they fit."""
        return self._background.run(
            self._client.estimate_memory(prompt_tokens=prompt_tokens, max_tokens=max_tokens, rows=rows, model=model)
        )

    def model(self, name: str = "") -> ModelInfo:
        """What is known about a model; "" means the served one."""
        return self._background.run(self._client.model(name))

    def models(self) -> list[ModelSummary]:
        """All models that can be asked for, every page."""
        return self._background.run(self._client.models())

    def health(self, service: str = READINESS_SERVICE) -> str:
        """Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness."""
        return self._background.run(self._client.health(service))

    def wait_ready(self, *, timeout_seconds: float = 60.0) -> None:
        """Wait until the server takes generations; it need not be reachable yet.

        Raises:
            UnavailableError: It was not ready in time.
        """
        self._background.run(self._client.wait_ready(timeout_seconds=timeout_seconds))
