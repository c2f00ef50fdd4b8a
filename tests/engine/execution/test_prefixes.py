"""Rows that begin with the state of earlier ones say what cold rows say, whatever happened to those before."""

import asyncio

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.events import GenerationRequest, PrefillProgress, TokensGenerated
from engine.contracts.option_groups import CacheOptions
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TokenPrompt
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.execution.driving import collect, run, settings
from tests.engine.execution.holding import held, held_after
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import until

CONTEXT = 2048
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
GREEDY = {"max_tokens": 12, "eos_token_ids": ()}
SEEDED = GREEDY | {"temperature": 0.9, "seed": 5, "top_p": 0.9}
COLD = {"cache": CacheOptions(bypass=True)}


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(folder, max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture
async def engine(long_folder, tmp_path):
    async with Serving(long_folder, tmp_path) as engine:
        yield engine


class Serving:
    """An engine with a prefix store."""

    def __init__(self, folder, tmp_path, **changes):
        self.engine = Engine(settings(folder, tmp_path, **({"prefix_cache_bytes": None} | changes)))

    async def __aenter__(self):
        await self.engine.start()
        return self.engine

    async def __aexit__(self, *_):
        await self.engine.stop()


async def store_of(engine):
    """The store at rest: a round has passed since the last end was told."""
    await run(engine, prompt((99, 3)), max_tokens=1, **COLD)
    return engine._thread._batch._prefixes._store


def prompt(*parts):
    """Ids from (seed, length) pairs, one after the other; of one seed, shorter is a prefix of longer."""
    return TokenPrompt(tuple(token for seed, length in parts for token in random_prompt(seed, CONTEXT)[:length]))


async def cached(engine, asked, **options):
    """What the start says, after the end was seen to agree."""
    started, ids, _, end = await run(engine, asked, **options)
    assert end.stats.cached_tokens == started.cached_tokens
    return started.cached_tokens, ids


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_warm_prompts_say_what_cold_ones_say(engine, options):
    first = prompt((1, 100))
    asked = [first, prompt((1, 100), (2, 60)), prompt((1, 70), (3, 20)), prompt((1, 100), (4, 300)), first]
    wanted = [await cached(engine, one, **options, **COLD) for one in asked]
    assert {tokens for tokens, _ in wanted} == {0}
    found = [await cached(engine, one, **options) for one in asked]
    assert [tokens for tokens, _ in found] == [0, 100, 70, 100, 99]
    assert [ids for _, ids in found] == [ids for _, ids in wanted]


async def test_a_conversation_goes_on_where_it_stopped(engine):
    """The next turn begins after the answer, but for its last token, which nobody has fed."""
    first = prompt((1, 40))
    _, ids = await cached(engine, first, **GREEDY)
    second = TokenPrompt((*first.ids, *ids, *random_prompt(2, 10)))
    wanted = await cached(engine, second, **GREEDY, **COLD)
    tokens, again = await cached(engine, second, **GREEDY)
    assert (tokens, again) == (40 + 12 - 1, wanted[1])


async def test_the_token_that_ended_an_answer_is_kept_where_it_was_fed(engine):
    first = prompt((1, 40))
    _, ids = await cached(engine, first, **GREEDY, **COLD)
    place = next(index for index in range(4, 11) if ids[index] not in ids[:index])
    _, shown, _, end = await run(engine, first, **(GREEDY | {"eos_token_ids": (ids[place],)}))
    assert shown == ids[:place]
    with_end = (*first.ids, *ids[: place + 1])
    assert end.stats.cache_tokens in (with_end, with_end[:-1])  # it is fed where a step runs ahead of its reading
    second = TokenPrompt((*end.stats.cache_tokens, 7))
    assert (await cached(engine, second, **GREEDY))[0] == len(second.ids) - 1


async def test_the_plan_and_the_statistics_tell_of_the_store(engine):
    asked = prompt((1, 200))
    started, _, _, end = await run(engine, asked, **GREEDY)
    assert (started.execution.prompt_cache, started.cached_tokens) == (True, 0)
    started, _, _, end = await run(engine, asked, **GREEDY)
    assert started.cached_tokens == 199
    assert end.stats.prefill_tps == pytest.approx(1000 / end.stats.prefill_ms)
    started, _, _, _ = await run(engine, asked, **GREEDY, **COLD)
    assert not started.execution.prompt_cache


async def test_bypassing_neither_reads_nor_feeds(engine):
    asked = prompt((1, 50))
    await cached(engine, asked, **GREEDY, **COLD)
    assert len(await store_of(engine)) == 0
    await cached(engine, asked, **GREEDY)
    assert (await cached(engine, asked, **GREEDY, **COLD))[0] == 0


async def test_salts_keep_callers_apart(engine):
    asked = prompt((1, 50))
    for salt in ("", "a", "b"):
        salted = {"cache": CacheOptions(salt=salt)}
        assert (await cached(engine, asked, **GREEDY, **salted))[0] == 0
        assert (await cached(engine, asked, **GREEDY, **salted))[0] == 49


async def test_progress_begins_where_the_store_ended(engine):
    await cached(engine, prompt((1, 300)), **GREEDY)
    generation = await engine.generate(
        GenerationRequest(prompt=prompt((1, 300), (2, 200)), options=GenerateOptions(**GREEDY))
    )
    told = []
    while not isinstance(event := await generation.next_event(), TokensGenerated):
        told += [event.prefilled_tokens] if isinstance(event, PrefillProgress) else []
    assert told
    assert all(300 < tokens <= 500 for tokens in told)


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_eight_requests_with_one_prefix_at_once_are_each_as_if_alone(long_folder, tmp_path, options):
    """Field report 46: a live cache is handed out, or the eviction of one empties another."""
    asked = [prompt((1, 200), (seed, 3 * seed)) for seed in range(2, 10)]
    one_entry = 230 * (KV_BYTES_PER_TOKEN + 4)
    async with Serving(long_folder, tmp_path, prefix_cache_bytes=one_entry) as engine:
        wanted = [(await run(engine, one, **options, **COLD))[1] for one in asked]
        for round_ in range(4):
            await run(engine, prompt((1, 200)), **options)
            generations = [
                await engine.generate(GenerationRequest(prompt=one, options=GenerateOptions(**options)))
                for one in asked
            ]
            for generation in generations[round_ % 2 :: 2]:
                generation.abort(AbortReason.REQUESTED)
            ends = [await collect(generation) for generation in generations]
            for place, (_, ids, _, _) in enumerate(ends):
                expected = wanted[place] if place % 2 != round_ % 2 else wanted[place][: len(ids)]
                assert ids == expected, place
            assert (await store_of(engine)).nbytes <= one_entry
        assert len(await store_of(engine)) == 1


@pytest.mark.parametrize("events", range(7))
async def test_a_key_is_as_long_as_the_state_under_it_after_a_cancellation_at_any_step(engine, events):
    """Field report 48: a state of N tokens stored under N-1 feeds the last token twice."""
    asked = prompt((1, 17))
    told = 0
    with held(lambda row: row.prompt_tokens == 17 and row.position > 8 * told):  # an event brings about the next one
        neighbour = asyncio.create_task(run(engine, prompt((9, 60)), max_tokens=40, eos_token_ids=()))
        generation = await engine.generate(
            GenerationRequest(
                prompt=asked, options=GenerateOptions(max_tokens=60, eos_token_ids=(), prefill_chunk_size=8)
            )
        )
        while told < events:
            await asyncio.wait_for(generation.next_event(), 60)
            told += 1
        generation.abort(AbortReason.REQUESTED)
        _, _, _, end = await collect(generation)
        await neighbour
    for entry in await store_of(engine):
        assert {snapshot.tokens for snapshot in entry.snapshots} == {len(entry.key) // 4}
    if len(end.stats.cache_tokens) >= 16:
        assert len(await store_of(engine)) == 2
    longer = TokenPrompt((*asked.ids, *random_prompt(2, 9)))
    assert (await cached(engine, longer, **GREEDY))[1] == (await cached(engine, longer, **GREEDY, **COLD))[1]


async def test_the_limit_holds_at_rest_and_too_large_states_are_not_kept(long_folder, tmp_path):
    """Field report 51: the byte limit is parsed and never used; the last entry stays although it is above it."""
    limit = 100 * KV_BYTES_PER_TOKEN
    async with Serving(long_folder, tmp_path, prefix_cache_bytes=limit) as engine:
        for seed in range(30):
            await run(engine, prompt((seed, 30)), **GREEDY)
            assert 0 < (await store_of(engine)).nbytes <= limit
        held = list(await store_of(engine))
        await run(engine, prompt((77, 600)), **GREEDY)
        assert list(await store_of(engine)) == held
        assert (await cached(engine, prompt((77, 600)), **GREEDY))[0] == 0


async def test_a_limit_of_zero_turns_the_store_off(long_folder, tmp_path):
    async with Serving(long_folder, tmp_path, prefix_cache_bytes=0) as engine:
        started, _, _, _ = await run(engine, prompt((1, 50)), **GREEDY)
        assert not started.execution.prompt_cache
        assert (await cached(engine, prompt((1, 50)), **GREEDY))[0] == 0


async def test_rows_take_the_memory_that_kept_prefixes_hold(long_folder, tmp_path):
    budget = 768 * KV_BYTES_PER_TOKEN
    async with Serving(long_folder, tmp_path, state_bytes=budget, prefix_cache_bytes=budget) as engine:
        for seed in (1, 2):
            await run(engine, prompt((seed, 100)), **GREEDY)
        assert len(await store_of(engine)) == 2
        with held_after(1):
            generation = await engine.generate(
                GenerationRequest(
                    prompt=prompt((1, 100), (3, 600)), options=GenerateOptions(**(GREEDY | {"max_tokens": 60}))
                )
            )
            started = await generation.next_event()
            assert started.cached_tokens == 100
            store = engine._thread._batch._prefixes._store
            assert store.nbytes == 0
        _, ids, _, _ = await collect(generation)
        assert len(ids) == 60
        await until(lambda: store.nbytes)
        assert store.nbytes <= budget


async def test_a_long_prompt_serves_others_while_its_row_still_generates(engine):
    asked = prompt((1, 300))
    generation = await engine.generate(
        GenerationRequest(prompt=asked, options=GenerateOptions(max_tokens=400, eos_token_ids=()))
    )
    while not isinstance(await generation.next_event(), TokensGenerated):
        pass
    longer = prompt((1, 300), (2, 20))
    assert (await cached(engine, longer, **GREEDY)) == (299, (await cached(engine, longer, **GREEDY, **COLD))[1])
    generation.abort(AbortReason.REQUESTED)
    await collect(generation)


async def test_a_conversation_outlives_prompts_without_one(long_folder, tmp_path):
    limit = 200 * (KV_BYTES_PER_TOKEN + 4)
    async with Serving(long_folder, tmp_path, prefix_cache_bytes=limit) as engine:
        await run(engine, prompt((1, 40)), cache_session_id="talk", **GREEDY)
        for seed in range(2, 9):
            await run(engine, prompt((seed, 60)), **GREEDY)
        assert (await cached(engine, prompt((1, 40), (2, 5)), **GREEDY))[0] == 40


async def disk_is_read(engine):
    await run(engine, prompt((9, 3)), max_tokens=1)
    assert await asyncio.to_thread(engine._thread._batch._prefixes._disk.wait_idle, 60)


async def test_long_prompts_are_warm_after_a_restart_of_the_same_model_alone(long_folder, tmp_path, caplog):
    kept = {"prefix_cache_dir": tmp_path / "kept"}
    asked = prompt((1, 400))
    async with Serving(long_folder, tmp_path, **kept) as engine:
        wanted = await cached(engine, asked, **GREEDY)
        await cached(engine, prompt((2, 100)), **GREEDY)
    assert len(list((tmp_path / "kept").rglob("*.safetensors"))) == 1
    async with Serving(long_folder, tmp_path, **kept) as engine:
        await disk_is_read(engine)
        assert await cached(engine, asked, **GREEDY) == (399, wanted[1])
        assert (await cached(engine, asked, **GREEDY, **COLD)) == (0, wanted[1])
        assert len(await store_of(engine)) == 1
    other = tmp_path / "other"
    tiny_model.write(other, max_position_embeddings=CONTEXT, seed=8)
    for folder, changes in ((other, {}), (long_folder, {"row_tile_tokens": 8})):
        async with Serving(folder, tmp_path, **kept, **changes) as engine:
            await disk_is_read(engine)
            assert (await cached(engine, asked, **GREEDY))[0] == 0
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
