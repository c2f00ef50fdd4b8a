"""A durable stream against a server that fails as the test says: every token once, or an error that says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from mlxstream import (
    AsyncClient,
    Client,
    DataLossError,
    DeadlineExceededError,
    Durability,
    FailedPreconditionError,
    GenerationCancelledError,
    Interruption,
    InvalidRequestError,
    NotFoundError,
    OutOfRangeError,
    OverloadedError,
    Resumption,
    ServerError,
    StreamCutError,
    UnavailableError,
)
from tests.clients.python.durable_server import EVERYTHING, WORDS, DurableServer, Failure, durable_server
from tests.clients.python.scripted_server import eventually

Server = tuple[DurableServer, str]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with durable_server() as running:
        yield running


@dataclass
class Seen:
    """Everything that one stream has given."""

    text: str = ""
    indices: list[int] = field(default_factory=list)
    kinds: list[str | None] = field(default_factory=list)
    events: list[Interruption | Resumption] = field(default_factory=list)
    error: Exception | None = None


async def watch(server: Server, durability: Durability | None = None, **arguments: Any) -> Seen:
    """Run a durable stream to its end, whatever that is."""
    seen = Seen()
    durability = durability or Durability(on_event=seen.events.append)
    async with AsyncClient(server[1], timeout_seconds=arguments.pop("timeout_seconds", 20)) as client:
        try:
            async for response in client.stream("hi", durable=durability, **arguments).events():
                seen.kinds.append(response.WhichOneof("event"))
                seen.indices += [token.index for token in response.chunk.tokens]
                seen.text += response.chunk.text
        except Exception as error:
            seen.error = error
    return seen


def assert_whole(seen: Seen) -> None:
    assert seen.error is None
    assert seen.text == EVERYTHING
    assert seen.indices == list(range(len(WORDS)))
    assert seen.kinds.count("started") == seen.kinds.count("finished") == 1
    assert (seen.kinds[0], seen.kinds[-1]) == ("started", "finished")


async def test_a_stream_that_nothing_happens_to_is_an_ordinary_one_that_asks_to_be_durable(server: Server) -> None:
    seen = await watch(server)
    assert_whole(seen)
    assert seen.events == []
    (request,) = server[0].generates
    assert request.delivery.durable
    assert request.request_id


@pytest.mark.parametrize("after", range(1, 23))
async def test_a_loss_after_any_message_costs_no_token_and_doubles_none(server: Server, after: int) -> None:
    server[0].failures = [Failure(after)]
    seen = await watch(server)
    assert_whole(seen)
    (resume,) = server[0].resumes
    assert (resume.generation_id, resume.after_sequence) == ("g1", after)
    kinds = [type(event) for event in seen.events]
    assert kinds == [Interruption, Resumption]


@pytest.mark.parametrize("tokens_per_message", [2, 7])
async def test_many_losses_in_a_row_cost_nothing_either(server: Server, tokens_per_message: int) -> None:
    server[0].tokens_per_message = tokens_per_message
    server[0].failures = [Failure(3), Failure(0), Failure(1), Failure(2), Failure(4), Failure(2)]
    seen = await watch(server)
    assert_whole(seen)
    assert server[0].failures == []


@pytest.mark.parametrize(
    "failure",
    [
        Failure(4, code=None),
        Failure(4, grpc.StatusCode.INTERNAL),
        Failure(4, grpc.StatusCode.UNKNOWN),
        Failure(4, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", told=True),
        Failure(4, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_seconds=0.01),
    ],
)
async def test_every_way_in_which_a_server_goes_away_is_survived(server: Server, failure: Failure) -> None:
    server[0].failures = [failure]
    assert_whole(await watch(server))


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure(4, grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_MISMATCH"), FailedPreconditionError),
        (Failure(4, grpc.StatusCode.NOT_FOUND, "NOT_FOUND"), NotFoundError),
        (Failure(4, grpc.StatusCode.CANCELLED, "TAKEN_OVER"), GenerationCancelledError),
        (Failure(4, grpc.StatusCode.INTERNAL, "GENERATION_FAILED", told=True), ServerError),
        (Failure(4, grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_MEMORY"), OverloadedError),
        (Failure(4, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"), InvalidRequestError),
    ],
)
async def test_what_no_repetition_helps_is_raised_at_once(
    server: Server, failure: Failure, kind: type[Exception]
) -> None:
    server[0].failures = [failure]
    seen = await watch(server)
    assert isinstance(seen.error, kind)
    assert server[0].resumes == []
    assert server[0].aborts == []  # it may be somebody else's by now
    assert (seen.kinds[-1] == "finished") == failure.told


async def test_a_request_that_is_lost_before_it_began_is_sent_again_under_its_name(server: Server) -> None:
    server[0].failures = [Failure(0, code=None), Failure(0, grpc.StatusCode.INTERNAL)]
    assert_whole(await watch(server, request_id="mine"))
    assert [request.request_id for request in server[0].generates] == ["mine"] * 3
    assert server[0].resumes == []


LOST_POINTS = [
    Failure(0, grpc.StatusCode.OUT_OF_RANGE, "RESUME_POINT_GONE"),
    Failure(0, grpc.StatusCode.DATA_LOSS, "CHECKPOINT_DAMAGED"),
]


@pytest.mark.parametrize("lost", LOST_POINTS)
async def test_a_server_that_has_lost_the_end_of_its_log_is_asked_for_everything_again(
    server: Server, lost: Failure
) -> None:
    server[0].tokens_per_message = 3
    server[0].failures = [Failure(5), lost, None]
    seen = await watch(server)
    assert_whole(seen)
    assert [resume.after_sequence for resume in server[0].resumes] == [5, 0]


async def test_a_loss_while_everything_is_said_again_costs_nothing_either(server: Server) -> None:
    server[0].tokens_per_message = 3
    server[0].failures = [Failure(6), LOST_POINTS[0], Failure(3), None]
    seen = await watch(server)
    assert_whole(seen)
    assert [resume.after_sequence for resume in server[0].resumes] == [6, 0, 3]


async def test_nothing_helps_where_everything_is_lost(server: Server) -> None:
    server[0].failures = [Failure(4), LOST_POINTS[1], LOST_POINTS[1]]
    seen = await watch(server)
    assert isinstance(seen.error, DataLossError)
    assert [resume.after_sequence for resume in server[0].resumes] == [4, 0]


async def test_a_point_that_the_caller_has_named_is_not_replaced_by_another(server: Server) -> None:
    server[0].sent[4] = 2
    server[0].failures = [Failure(0, grpc.StatusCode.OUT_OF_RANGE, "RESUME_POINT_GONE")]
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        with pytest.raises(OutOfRangeError):
            _ = [text async for text in client.resume("g1", after_sequence=4)]
        assert "".join([text async for text in client.resume("g1", after_sequence=4)]) == "".join(WORDS[2:])


async def test_the_pause_is_at_least_as_long_as_the_server_asks_for(server: Server) -> None:
    server[0].failures = [Failure(4, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_seconds=0.4)]
    seen = await watch(server)
    assert_whole(seen)
    assert isinstance(seen.events[0], Interruption)
    assert seen.events[0].pause_seconds == pytest.approx(0.4)


async def test_pauses_grow_and_are_bounded_and_patience_ends(server: Server) -> None:
    server[0].failures = [Failure(4), *[Failure(0) for _ in range(40)]]
    events: list[Interruption | Resumption] = []
    seen = await watch(server, Durability(on_event=events.append, patience_seconds=1.0))
    assert isinstance(seen.error, UnavailableError)
    assert seen.indices == [0, 1]
    pauses = [event.pause_seconds for event in events if isinstance(event, Interruption)]
    assert all(0.05 * 2**place <= pause <= 0.1 * 2**place for place, pause in enumerate(pauses[:4]))
    assert max(pauses) <= 2.0
    assert len(server[0].resumes) < 20


async def test_the_deadline_is_that_of_the_whole_stream(server: Server) -> None:
    server[0].failures = [Failure(4), *[Failure(0) for _ in range(40)]]
    seen = await watch(server, timeout_seconds=1.5)
    assert isinstance(seen.error, UnavailableError | DeadlineExceededError)
    given = [seconds for seconds in server[0].deadlines if seconds is not None]
    assert len(given) == len(server[0].deadlines)
    assert given == sorted(given, reverse=True)
    assert given[-1] < given[0] < 1.6


async def test_nobody_there_at_the_first_try_is_an_error_soon() -> None:
    events: list[Interruption | Resumption] = []
    durability = Durability(on_event=events.append, first_patience_seconds=0.5)
    seen = await watch((DurableServer(), "127.0.0.1:1"), durability)
    assert isinstance(seen.error, UnavailableError)
    assert events
    seen = await watch((DurableServer(), "no-such-host.invalid:1"))
    assert isinstance(seen.error, UnavailableError)
    assert seen.events == []


async def test_leaving_the_stream_ends_the_generation_at_the_server(server: Server) -> None:
    server[0].endless = True
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        async for _ in client.stream("hi", durable=True):
            break
    assert [abort.generation_id for abort in server[0].aborts] == ["g1"]


async def test_leaving_before_the_first_event_ends_it_by_the_name_of_the_request(server: Server) -> None:
    server[0].silent = True
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        reading = asyncio.ensure_future(_read(client.stream("hi", durable=True)))
        await eventually(lambda: len(server[0].generates) == 1)
        reading.cancel()
    assert [abort.request_id for abort in server[0].aborts] == [server[0].generates[0].request_id]


async def test_a_deadline_that_passes_counts_as_leaving(server: Server) -> None:
    server[0].endless = True
    seen = await watch(server, timeout_seconds=2)
    assert isinstance(seen.error, DeadlineExceededError)
    assert [abort.generation_id for abort in server[0].aborts] == ["g1"]


@pytest.mark.parametrize("silent", [True, False])
async def test_closing_the_client_ends_what_still_runs_and_its_reader_is_told(server: Server, silent: bool) -> None:
    server[0].endless, server[0].silent = True, silent
    client = AsyncClient(server[1], timeout_seconds=20)
    reading = asyncio.ensure_future(_read(client.stream("hi", durable=True)))
    await eventually(lambda: len(server[0].generates) == 1)
    await client.close()
    assert len(server[0].aborts) == 1
    with pytest.raises(GenerationCancelledError, match="the client was closed"):
        await reading


async def test_closing_a_client_does_not_wait_for_a_server_that_is_gone(server: Server) -> None:
    server[0].endless, server[0].farewell_seconds = True, 3600
    client = AsyncClient(server[1], timeout_seconds=20)
    async for _ in client.stream("hi", durable=True):
        break
    await asyncio.wait_for(client.close(), 60)
    assert server[0].order == []


@pytest.mark.parametrize("durable", [True, False])
async def test_who_resumes_a_stream_that_was_just_left_comes_after_the_farewell(server: Server, durable: bool) -> None:
    servicer, target = server
    servicer.endless, servicer.farewell_seconds = True, 0.2
    async with AsyncClient(target) as client:
        async for _ in client.stream("x", durable=True):
            break
        async for _ in client.resume("g1", after_sequence=3, durable=durable):
            break
    assert servicer.order[:2] == ["aborted", "resumed"]


async def test_leaving_while_the_server_is_away_stops_the_tries(server: Server) -> None:
    server[0].failures = [Failure(4), *[Failure(0) for _ in range(40)]]
    lost = asyncio.Event()
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        stream = client.stream("hi", durable=Durability(on_event=lambda _: lost.set()))
        reading = asyncio.ensure_future(_read(stream))
        await lost.wait()
        stream.cancel()
        assert await asyncio.wait_for(reading, 60) == "0 1 "
    assert stream.finish_reason is None


async def test_a_cancelled_task_ends_it_too(server: Server) -> None:
    server[0].endless = True
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        stream = client.stream("hi", durable=True)
        reading = asyncio.ensure_future(_read(stream))
        await eventually(lambda: stream.usage.generated_tokens == len(WORDS))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: len(server[0].aborts) == 1)


async def _read(stream: Any) -> str:
    return "".join([text async for text in stream])


async def test_the_account_is_that_of_one_stream(server: Server) -> None:
    server[0].failures = [Failure(6), Failure(3)]
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        stream = client.stream("hi", durable=True)
        assert await _read(stream) == EVERYTHING
        assert stream.usage.prompt_tokens == 3
        assert stream.started is not None
        assert stream.started.resumed_tokens == 0
        assert str(stream.finish_reason) == "stop"


async def test_delivery_options_can_ask_for_it_too(server: Server) -> None:
    server[0].failures = [Failure(6)]
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        assert await _read(client.stream("hi", delivery={"durable": True})) == EVERYTHING


async def test_a_resumed_stream_that_shall_not_survive_does_not(server: Server) -> None:
    server[0].sent[2] = 0
    server[0].failures = [Failure(4)]
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        with pytest.raises(UnavailableError):
            await _read(client.resume("g1", after_sequence=2, durable=False))
    assert len(server[0].resumes) == 1


async def test_a_stream_cut_without_durability_stays_an_error(server: Server) -> None:
    server[0].failures = [Failure(6, code=None)]
    async with AsyncClient(server[1], timeout_seconds=20) as client:
        with pytest.raises(StreamCutError):
            await _read(client.stream("hi"))


async def test_the_client_for_threads_survives_as_well(server: Server) -> None:
    server[0].failures = [Failure(6), Failure(1)]

    def read() -> tuple[str, str]:
        with Client(server[1], timeout_seconds=20) as client:
            whole = "".join(client.stream("hi", durable=True))
            return whole, "".join(client.resume("g1"))

    assert await asyncio.to_thread(read) == (EVERYTHING, EVERYTHING)
