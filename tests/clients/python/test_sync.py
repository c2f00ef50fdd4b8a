"""The client of plain threads: the same results and ends, and nothing left behind."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import mlxstream
from tests.clients.python.scripted_server import Behaviour, ThreadedServer, answer, endless, silent
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(answer("Hello", ", ", "world"))
    yield running
    running.close()


@pytest.fixture
def client(server: ThreadedServer) -> Iterator[mlxstream.Client]:
    with mlxstream.Client(server.scripted.target, timeout_seconds=20) as connected:
        yield connected


def client_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mlxstream-client"}


def assert_end(threads: set[threading.Thread]) -> None:
    """Whoever ends them does not always wait for their very end."""
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def once_it_runs(server: ThreadedServer, act: Callable[[], object]) -> None:
    """Have another thread `act` as soon as the server has taken up a call."""

    def watch() -> None:
        server.wait_running(1)
        act()

    threading.Thread(target=watch).start()


def press_control_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_iterating_gives_the_text_and_then_the_account(client: mlxstream.Client) -> None:
    stream = client.stream("hi")
    assert list(stream) == ["Hello", ", ", "world"]
    assert stream.finish_reason == "stop"
    assert stream.usage.generated_tokens == 3
    assert stream.stats is not None
    assert stream.started is not None


def test_events_are_all_messages(client: mlxstream.Client) -> None:
    kinds = [event.WhichOneof("event") for event in client.stream("hi").events()]
    assert kinds == ["started", "chunk", "chunk", "chunk", "finished"]


def test_break_ends_the_generation(server: ThreadedServer, client: mlxstream.Client) -> None:
    server.scripted.generations.behaviour = endless
    stream = client.stream("hi")
    for _ in stream:
        break
    server.wait_cancelled()
    assert list(stream) == []


def test_leaving_the_block_ends_the_generation(server: ThreadedServer, client: mlxstream.Client) -> None:
    server.scripted.generations.behaviour = endless
    with client.stream("hi") as stream:
        iteration = iter(stream)
        next(iteration)
    server.wait_cancelled()


def test_cancel_from_another_thread_stops_a_waiting_iteration(server: ThreadedServer, client: mlxstream.Client) -> None:
    server.scripted.generations.behaviour = silent
    stream = client.stream("hi")
    once_it_runs(server, stream.cancel)
    assert list(stream) == []
    server.wait_cancelled()


def test_an_interrupted_wait_ends_the_generation(server: ThreadedServer, client: mlxstream.Client) -> None:
    server.scripted.generations.behaviour = silent
    once_it_runs(server, press_control_c)
    with pytest.raises(KeyboardInterrupt):
        list(client.stream("hi"))
    server.wait_cancelled()


def test_errors_are_those_of_the_asynchronous_client(server: ThreadedServer, client: mlxstream.Client) -> None:
    server.scripted.generations.behaviour = silent
    with pytest.raises(mlxstream.DeadlineExceededError):
        list(client.stream("hi", timeout_seconds=0.1))
    with pytest.raises(mlxstream.NotFoundError):
        client.model("huge")
    with pytest.raises(TypeError, match="did you mean 'top_k'"):
        client.stream("hi", top_kk=1)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda client: client.generate("hi").text, "Hello, world"),
        (lambda client: client.tokenize("a"), [97]),
        (lambda client: client.detokenize([97]), "a"),
        (lambda client: client.render_chat([{"role": "user", "content": "x"}]).text, "user: x"),
        (lambda client: client.model().name, "tiny"),
        (lambda client: [model.name for model in client.models()], ["a", "b", "c"]),
        (lambda client: client.health(), "SERVING"),
        (lambda client: client.wait_ready(timeout_seconds=20), None),
        (lambda client: client.abort(request_id="r1").HasField("stats"), False),
    ],
)
def test_every_call_waits_for_its_result(
    call: Callable[[mlxstream.Client], object], expected: object, client: mlxstream.Client
) -> None:
    assert call(client) == expected


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [(mlxstream.Client, mlxstream.AsyncClient), (mlxstream.TextStream, mlxstream.AsyncTextStream)],
)
def test_help_is_as_good_here_as_on_the_asynchronous_side(plain: type, asynchronous: type) -> None:
    names = [name for name in vars(asynchronous) if not name.startswith("_")]
    assert names == [name for name in vars(plain) if not name.startswith("_")]
    for name in set(names) - {"close", "cancel"}:  # these end more, and from more places
        assert inspect.getdoc(getattr(plain, name)) == inspect.getdoc(getattr(asynchronous, name))
    assert "See `" not in "".join(inspect.getdoc(getattr(plain, name)) or "" for name in names)


def test_a_stream_shows_how_far_it_is(client: mlxstream.Client) -> None:
    stream = client.stream("hi")
    assert list(stream) == ["Hello", ", ", "world"]
    assert repr(stream) == "<TextStream: stop, 3 generated tokens>"


def test_one_client_serves_many_threads(client: mlxstream.Client) -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append("".join(client.stream("hi")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["Hello, world"] * 8


def test_closing_ends_the_thread_and_what_is_running(server: ThreadedServer) -> None:
    before = client_threads()
    client = mlxstream.Client(server.scripted.target)
    (own,) = client_threads() - before
    server.scripted.generations.behaviour = endless
    iteration = iter(client.stream("hi"))
    next(iteration)
    client.close()
    client.close()
    server.wait_cancelled()
    assert_end({own})
    for call in (lambda: next(iteration), lambda: client.generate("hi"), lambda: next(client.watch_health())):
        with pytest.raises(mlxstream.GenerationCancelledError, match="client was closed") as caught:
            call()
        assert caught.value.reason == "CLIENT_CLOSED"


@pytest.mark.parametrize("behaviour", [silent, endless])
def test_closing_ends_calls_that_other_threads_wait_for(behaviour: Behaviour, server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = behaviour
    client = mlxstream.Client(server.scripted.target)
    ends: list[BaseException] = []

    def wait_for(call: Callable[[], object]) -> None:
        try:
            call()
        except mlxstream.GenerationCancelledError as error:
            ends.append(error)

    calls = (lambda: list(client.stream("hi")), lambda: client.generate("hi"))
    threads = [threading.Thread(target=wait_for, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    server.wait_running(2)
    client.close()
    for thread in threads:
        thread.join()
    assert len(ends) == 2


def test_a_dropped_client_ends_its_thread(server: ThreadedServer) -> None:
    before = client_threads()
    client = mlxstream.Client(server.scripted.target)
    assert client.generate("hi").text == "Hello, world"
    own = client_threads() - before
    assert len(own) == 1
    del client
    gc.collect()
    assert_end(own)


LEAVE_EVERYTHING_OPEN = """
import asyncio, sys
import mlxstream
target = sys.argv[1]
client = mlxstream.Client(target)
for text in client.stream("hi"):
    break
kept = iter(client.stream("hi"))
next(kept)

async def main():
    client = mlxstream.AsyncClient(target)
    async for text in client.stream("hi"):
        break
    kept = aiter(client.stream("hi"))
    await anext(kept)
    unread = client.stream("hi")
    return client, kept, unread

left = asyncio.run(main())
"""


FORK = """
import os, sys
import mlxstream
client = mlxstream.Client(sys.argv[1])
print(client.generate("hi").text, flush=True)
if child := os.fork():
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, client.generate("hi").text, flush=True)
else:
    try:
        client.generate("hi")
    except RuntimeError as error:
        print(error, flush=True)
    client.close()
    os._exit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is not forked under gRPC")
def test_a_forked_process_is_told_that_the_client_is_of_no_use_there(server: ThreadedServer) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK, server.scripted.target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    complaint = "a client does not survive a fork, and neither does gRPC: spawn processes instead"
    assert ended.stdout.splitlines() == ["Hello, world", complaint, "3 Hello, world"]


def test_a_program_that_leaves_everything_open_ends_in_silence(server: ThreadedServer) -> None:
    server.scripted.generations.behaviour = endless
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", LEAVE_EVERYTHING_OPEN, server.scripted.target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
