"""Durable streams on the real engine: through the ends of servers, with every kind of sampling and of state."""

import os

import pytest

from mlxstream import FailedPreconditionError, NotFoundError, OutOfRangeError, UnavailableError
from tests.engine import tiny_model
from tests.waiting import until
from tests.whole.conftest import CONTEXT
from tests.whole.durable_runs import LENGTH, REQUESTS, asked, begun, life, ordinary, raw_stream, read


async def whole_run(folder, state_dir, request, **settings):
    async with life(folder, state_dir, **settings) as (_, client):
        return await read(client.stream(**ordinary(request)))


@pytest.mark.parametrize("kind", list(REQUESTS))
async def test_a_stream_that_is_cut_twice_by_a_restart_equals_the_uninterrupted_one(whole_folder, tmp_path, kind):
    request = asked(kind)
    expected = await whole_run(whole_folder, tmp_path, request)
    seen = await begun(whole_folder, tmp_path, request, 23)
    async with life(whole_folder, tmp_path) as (_, client):
        seen = seen.then(await read(client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False), 40))
    async with life(whole_folder, tmp_path) as (_, client):
        rest = await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
    assert rest.resumed_tokens >= len(seen.tokens)
    seen = seen.then(rest)
    assert (seen.ids, seen.text, seen.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
    assert seen.tokens == expected.tokens


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model whose heads can be quantized in groups."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    tiny_model.write(folder, max_position_embeddings=CONTEXT, head_dim=64)
    return folder


@pytest.mark.parametrize("storage", ["affine8", "turbo-k4v4", "paged", "affine4-g32-start48"])
async def test_every_form_of_state_goes_on_exactly(wide_folder, tmp_path, storage):
    request = asked("seeded")
    settings = {"kv_storage": storage}
    expected = await whole_run(wide_folder, tmp_path, request, **settings)
    seen = await begun(wide_folder, tmp_path, request, 37, **settings)
    async with life(wide_folder, tmp_path, **settings) as (_, client):
        seen = seen.then(await read(client.resume(seen.generation_id, after_sequence=seen.sequence)))
    assert (seen.ids, seen.text) == (expected.ids, expected.text)


async def test_a_stop_that_began_before_the_restart_is_met_after_it(whole_folder, tmp_path):
    request = asked("seeded")
    expected = await whole_run(whole_folder, tmp_path, request)
    for start in range(20, 60):
        stop = expected.text[start : start + 6]
        if len(stop) == 6 and expected.text.find(stop) == start:
            break
    request["stop_sequences"] = [stop]
    whole = await whole_run(whole_folder, tmp_path, request)
    assert stop not in whole.text
    cut = len(whole.tokens) - 3
    seen = await begun(whole_folder, tmp_path, request, cut)
    async with life(whole_folder, tmp_path) as (_, client):
        stream = client.resume(seen.generation_id, after_sequence=seen.sequence)
        seen = seen.then(await read(stream))
        assert stream.finished.matched_stop == stop
    assert (seen.ids, seen.text, seen.finish_reason) == (whole.ids, whole.text, whole.finish_reason)


async def test_a_seed_that_the_server_chose_goes_on_and_the_identical_request_finds_it(whole_folder, tmp_path):
    request = asked("seeded", seed=None)
    seen = await begun(whole_folder, tmp_path, request, 30)
    async with life(whole_folder, tmp_path) as (_, client):
        stream = client.stream(**request, durable=True)
        again = await read(stream)
        assert again.generation_id == seen.generation_id
        assert again.ids[:30] == seen.ids[:30]
        expected = await read(client.stream(**ordinary(request) | {"seed": stream.started.options.seed}))
        assert (again.ids, again.text) == (expected.ids, expected.text)
        assert not stream.started.seed_was_explicit
        fresh = await read(client.stream(**request, durable=True))
    assert fresh.generation_id != seen.generation_id
    assert fresh.resumed_tokens == 0


async def test_a_crash_after_the_last_token_brings_the_end_without_computing(whole_folder, tmp_path):
    request = asked("greedy")
    expected = await whole_run(whole_folder, tmp_path, request)
    seen = await begun(whole_folder, tmp_path, request, LENGTH)
    async with life(whole_folder, tmp_path) as (_, client):
        rest = await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
    assert rest.tokens == []
    assert str(rest.finish_reason) == "length"
    assert (seen.ids, seen.text + rest.text) == (expected.ids, expected.text)


async def test_the_last_message_can_be_had_again_after_a_crash_until_its_time_is_over(whole_folder, tmp_path):
    request = asked("greedy")
    async with life(whole_folder, tmp_path) as (_, client):
        whole = await read(raw_stream(client, request))
    (folder,) = (tmp_path / "durable").iterdir()
    assert {path.name for path in folder.iterdir()} == {"tokens.log", "delivered"}
    async with life(whole_folder, tmp_path) as (_, client):
        rest = await read(client.resume(whole.generation_id, after_sequence=whole.sequence - 1))
        assert (rest.tokens, str(rest.finish_reason)) == ([], "length")
    os.utime(folder / "delivered", (0, 0))
    async with life(whole_folder, tmp_path) as (_, client):
        await until(lambda: not folder.exists())  # nobody has to ask for it
        with pytest.raises(OutOfRangeError):
            await read(client.resume(whole.generation_id))


async def test_a_row_that_nobody_reads_goes_on_for_the_grace_period_and_stays_on_disk(whole_folder, tmp_path):
    request = asked("seeded", max_tokens=3000)
    async with life(whole_folder, tmp_path, grace_seconds=0.05) as (whole, client):
        stream = raw_stream(client, request)
        seen = await read(stream, 20)
        stream._reader._call.cancel()
        await until(lambda: not whole.jobs)
        more = await read(client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False), 10)
        assert more.resumed_tokens >= 20
        seen.then(more)


async def test_the_identical_request_joins_by_its_own_request_id(whole_folder, tmp_path):
    request = {**asked("greedy", max_tokens=3000), "request_id": "mine"}
    async with life(whole_folder, tmp_path) as (_, client):
        first = await read(raw_stream(client, request), 5)
        again = await read(raw_stream(client, request), 10)
    assert again.generation_id == first.generation_id
    assert again.ids[:5] == first.ids[:5]


async def test_two_servers_over_one_folder_do_not_run_one_generation_twice(whole_folder, tmp_path):
    request = asked("seeded", max_tokens=3000)
    async with life(whole_folder, tmp_path) as (_, client), life(whole_folder, tmp_path) as (_, other):
        stream = raw_stream(client, request)
        seen = await read(stream, 20)
        with pytest.raises(UnavailableError):
            await read(other.resume(seen.generation_id, durable=False))
        twin = await read(other.stream(**request, durable=True), 5)
        assert twin.generation_id != seen.generation_id
    async with life(whole_folder, tmp_path) as (_, client):
        more = await read(client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False), 10)
        seen.then(more)


async def test_another_model_or_storage_is_a_failed_precondition_and_loses_nothing(wide_folder, tmp_path):
    request = asked("greedy")
    expected = await whole_run(wide_folder, tmp_path, request)
    seen = await begun(wide_folder, tmp_path, request, 20)
    other = tmp_path / "tiny"
    tiny_model.write(other, max_position_embeddings=CONTEXT, head_dim=64, scale=3.5)
    for folder, settings, name in ((other, {}, "weights"), (wide_folder, {"kv_storage": "affine8"}, "kv_storage")):
        async with life(folder, tmp_path, **settings) as (_, client):
            with pytest.raises(FailedPreconditionError, match=name):
                await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
    async with life(wide_folder, tmp_path) as (_, client):
        seen = seen.then(await read(client.resume(seen.generation_id, after_sequence=seen.sequence)))
    assert seen.ids == expected.ids


async def test_what_is_too_old_is_out_of_range_and_what_never_was_is_not_found(wide_folder, tmp_path):
    seen = await begun(wide_folder, tmp_path, asked("greedy"), 20)
    (folder,) = (tmp_path / "durable").iterdir()
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, 0))
    async with life(wide_folder, tmp_path) as (_, client):
        with pytest.raises(OutOfRangeError) as failure:
            await read(client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False))
        assert failure.value.reason == "RESUME_POINT_GONE"
        with pytest.raises(NotFoundError):
            await read(client.resume("0" * 32))
