"""Several servers, of which only one knows a generation: whoever resumes or ends it is sent to that one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from mlxstream import AsyncClient, Durability, NotFoundError, UnavailableError
from tests.clients.python.durable_server import WORDS, DurableServer, Failure, durable_server

UNKNOWN = Failure(0, grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
AWAY = Failure(0, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")


@pytest.fixture
async def three() -> AsyncIterator[tuple[list[DurableServer], AsyncClient]]:
    """Servers that know a generation after its fourth message, and a client of all three."""
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(durable_server()) for _ in range(3)]
        for servicer, _ in running:
            servicer.sent[4] = 2
        targets = [target for _, target in running]
        yield [servicer for servicer, _ in running], await stack.enter_async_context(AsyncClient(targets))


async def rest(client: AsyncClient, patience_seconds: float = 20.0) -> str:
    durability = Durability(patience_seconds=patience_seconds)
    return "".join([text async for text in client.resume("g1", after_sequence=4, durable=durability)])


@pytest.mark.parametrize("which", range(3))
async def test_who_resumes_is_sent_to_the_server_that_knows(
    three: tuple[list[DurableServer], AsyncClient], which: int
) -> None:
    servers, client = three
    for place, server in enumerate(servers):
        server.failures = [] if place == which else [UNKNOWN]
    assert await rest(client) == "".join(WORDS[2:])


async def test_a_generation_is_unknown_when_every_server_has_said_so(
    three: tuple[list[DurableServer], AsyncClient],
) -> None:
    servers, client = three
    for server in servers:
        server.failures = [UNKNOWN]
    with pytest.raises(NotFoundError):
        await rest(client)
    assert [len(server.resumes) for server in servers] == [1, 1, 1]


@pytest.mark.parametrize("place", range(3))
async def test_a_server_that_is_away_may_know_it_yet(
    three: tuple[list[DurableServer], AsyncClient], place: int
) -> None:
    servers, client = three
    for server in servers:
        server.failures = [UNKNOWN, UNKNOWN]
    servers[place].failures = [AWAY] * 4  # which gRPC tries once more each
    assert await rest(client) == "".join(WORDS[2:])
    servers[place].failures = [AWAY] * 40
    for server in servers[:place] + servers[place + 1 :]:
        server.failures = [UNKNOWN] * 40
    with pytest.raises(UnavailableError):
        await rest(client, patience_seconds=0.1)


async def test_a_stream_that_is_lost_finds_its_server_again(three: tuple[list[DurableServer], AsyncClient]) -> None:
    servers, client = three
    servers[0].failures, servers[1].failures = [UNKNOWN], [Failure(3), Failure(2)]
    assert await rest(client) == "".join(WORDS[2:])
    assert [len(server.resumes) for server in servers] == [1, 3, 0]


@pytest.mark.parametrize("which", range(3))
async def test_an_abort_asks_until_one_knows_the_generation(
    three: tuple[list[DurableServer], AsyncClient], which: int
) -> None:
    servers, client = three
    for place, server in enumerate(servers):
        server.knows = place == which
    assert (await client.abort(generation_id="g1")).HasField("stats")
    assert [len(server.aborts) for server in servers] == [int(place <= which) for place in range(3)]


async def test_an_abort_of_nobody_is_no_error_and_one_that_nobody_hears_is(
    three: tuple[list[DurableServer], AsyncClient],
) -> None:
    servers, client = three
    for server in servers:
        server.knows = False
    assert not (await client.abort(request_id="r1")).HasField("stats")
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"]) as alone:
        with pytest.raises(UnavailableError):
            await alone.abort(request_id="r1")
