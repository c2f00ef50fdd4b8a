"""The client for plain threads: the asynchronous one, run on an event loop of its own in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS, AsyncClient
from mlxstream.connection import Tls
from mlxstream.errors import GenerationCancelledError
from mlxstream.failures import client_was_closed
from mlxstream.reader import EventReader
from mlxstream.stream import AsyncTextStream, Item, Iteration, StreamAccount, event_of, text_of
from mlxstream.v1.generation_pb2 import GenerateResponse

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


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
        """End the loop and its thread; more than once is harmless, and so it is in a process that was forked."""
        if self._thread.is_alive():
            with self._lock:
                self._finalizer()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        if threading.current_thread() is self._thread:
            raise RuntimeError("the client would wait for itself")
        if self._finalizer.alive and not self._thread.is_alive():
            raise RuntimeError("a client does not survive a fork, and neither does gRPC: spawn processes instead")
        with self._lock:  # what is submitted before the end is ended with the rest; afterwards nothing is
            if not self._finalizer.alive:
                raise client_was_closed()
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
    if not thread.is_alive():
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


class TextStream(StreamAccount):
    """One generation. Iterate over it for its text, or over `events()` for everything.

    The request is sent when the iteration begins. Leaving a loop early, or the `with` block, ends the generation.
    """

    def __init__(self, reader: EventReader, background: BackgroundLoop) -> None:
        super().__init__(reader)
        self._background = background

    def __iter__(self) -> SyncIteration[str]:
        """The text, piece by piece: joined, they are the completion."""
        return SyncIteration(Iteration(self._reader, text_of), self._background)

    def events(self) -> SyncIteration[GenerateResponse]:
        """Every message of the stream, the last one included."""
        return SyncIteration(Iteration(self._reader, event_of), self._background)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _waiting(
    method: Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Arguments], Result]:
    """The twin of a method that is awaited: it waits."""

    @functools.wraps(method)
    def call(client: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return client._background.run(method(client._client, *args, **kwargs))  # noqa: SLF001 - its own method

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, Arguments], AsyncTextStream],
) -> Callable[Concatenate[Client, Arguments], TextStream]:
    """The twin of a method that opens a stream."""

    @functools.wraps(method)
    def call(client: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> TextStream:
        stream = method(client._client, *args, **kwargs)  # noqa: SLF001 - its own method
        return TextStream(stream._reader, client._background)  # noqa: SLF001 - one reader, two kinds of iteration

    return call


def _walking(
    method: Callable[Concatenate[AsyncClient, Arguments], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[Client, Arguments], Iterator[Result]]:
    """The twin of a method that gives one thing after the other."""

    @functools.wraps(method)
    def call(client: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Result]:
        items, background = method(client._client, *args, **kwargs), client._background  # noqa: SLF001 - its own
        try:
            while (item := background.run(_next(items))) is not None:
                yield item
        finally:
            with contextlib.suppress(RuntimeError, GenerationCancelledError):  # closed, and the call with it
                background.run(_end(items))

    return call


class Client:
    """Talks to one server, from any thread. Use it in a `with` block, or call `close`.

    Methods, arguments, results and errors are those of `AsyncClient`, whose twin it is.
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
        """Describe the connection as `AsyncClient` does, and start the thread that will hold it; nothing is sent yet.

        Raises:
            ValueError: The target, the token or the deadline cannot be one.
        """
        self._client = AsyncClient(
            target, tls=tls, token=token, timeout_seconds=timeout_seconds, balanced=balanced, metadata=metadata
        )
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

    stream = _streaming(AsyncClient.stream)
    resume = _streaming(AsyncClient.resume)
    generate = _waiting(AsyncClient.generate)
    abort = _waiting(AsyncClient.abort)
    tokenize = _waiting(AsyncClient.tokenize)
    detokenize = _waiting(AsyncClient.detokenize)
    render_chat = _waiting(AsyncClient.render_chat)
    estimate_memory = _waiting(AsyncClient.estimate_memory)
    model = _waiting(AsyncClient.model)
    models = _waiting(AsyncClient.models)
    call = _waiting(AsyncClient.call)
    health = _waiting(AsyncClient.health)
    watch_health = _walking(AsyncClient.watch_health)
    wait_ready = _waiting(AsyncClient.wait_ready)


async def _next(items: AsyncGenerator[Result, None]) -> Result | None:
    return await anext(items, None)


async def _end(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
