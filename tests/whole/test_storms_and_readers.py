"""Many callers who leave, and callers who do not read: nothing stays behind, and nobody loses a token."""

import asyncio
import random

import grpc
import pytest

from tests.waiting import until
from tests.whole.calls import nothing_is_left, request
from tests.whole.conftest import serving

STORM = 500


async def read(responses):
    """Indexes, ids and text of a stream that ends well."""
    tokens, text, finished = [], "", None
    async for response in responses:
        tokens += response.chunk.tokens
        text += response.chunk.text
        if response.HasField("finished"):
            finished = response.finished
    assert finished is not None
    return [token.index for token in tokens], [token.token for token in tokens], text


@pytest.fixture
async def roomy(whole_folder, tmp_path):
    """A server that refuses nobody for want of room in its queue."""
    async with serving(whole_folder, tmp_path, max_queue=STORM) as whole:
        yield whole


async def test_a_storm_of_cancelled_calls_leaves_no_row_no_queue_and_no_bytes(roomy):
    rng = random.Random(5)
    ends = {}

    async def leave_soon(seed):
        call = roomy.generation.Generate(request(seed))
        await asyncio.sleep(rng.uniform(0, 0.005))
        call.cancel()
        code = await call.code()
        ends[code] = ends.get(code, 0) + 1

    for start in range(0, STORM, 50):
        await asyncio.gather(*(leave_soon(seed) for seed in range(start, start + 50)))
    assert ends == {grpc.StatusCode.CANCELLED: STORM}
    await until(lambda: nothing_is_left(roomy))
    indexes, _, _ = await read(roomy.generation.Generate(request(1, max_tokens=5)))
    assert indexes == list(range(5))


async def test_a_caller_who_leaves_during_a_long_prompt_frees_the_row_before_it_is_read(whole):
    call = whole.generation.Generate(request(1, prompt=3900, max_tokens=5, prefill_chunk_size=1))
    await until(lambda: len(whole.engine._thread._batch or ()) == 1)
    row = next(iter(whole.engine._thread._batch)).row
    await until(lambda: row.prefilled_tokens > 0)
    call.cancel()
    await until(lambda: nothing_is_left(whole))
    assert 0 < row.prefilled_tokens < 3900


async def test_a_deadline_during_a_long_prompt_frees_the_row(whole):
    call = whole.generation.Generate(request(1, prompt=3900, max_tokens=5, prefill_chunk_size=1), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: nothing_is_left(whole))


async def test_a_reader_who_stops_costs_nobody_and_finds_every_token_when_it_comes_back(whole):
    wanted = await read(whole.generation.Generate(request(3, max_tokens=1500)))
    slow = aiter(whole.generation.Generate(request(3, max_tokens=1500)))
    assert (await anext(slow)).HasField("started")
    others = await asyncio.gather(
        *(read(whole.generation.Generate(request(seed, max_tokens=60))) for seed in range(10, 14))
    )
    assert all(indexes == list(range(60)) for indexes, _, _ in others)
    await until(lambda: whole.jobs == 0)
    assert await read(slow) == wanted
    assert wanted[0] == list(range(1500))


async def test_a_reader_who_stopped_can_still_cancel(whole):
    slow = whole.generation.Generate(request(3, max_tokens=4000))
    await slow.read()
    slow.cancel()
    await until(lambda: nothing_is_left(whole))


async def test_eight_seeded_streams_over_the_wire_equal_each_alone(whole):
    requests = [request(seed, prompt=5 + 30 * seed, max_tokens=40, temperature=0.9, seed=seed) for seed in range(8)]
    alone = [await read(whole.generation.Generate(one)) for one in requests]
    assert await asyncio.gather(*(read(whole.generation.Generate(one)) for one in requests)) == alone
