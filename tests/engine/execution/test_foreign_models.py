"""Models of mlx-lm behind the engine's front door: chosen by themselves, exact, in company, cancelled, and told."""

import asyncio

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import UnsupportedOptionError
from engine.contracts.events import GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution.engine import Engine
from tests.engine.execution.driving import collect, run, settings, tokens
from tests.engine.execution.dying import die_after, go_on, request
from tests.engine.models import tiny_foreign
from tests.engine.models.tiny_foreign import ARCHITECTURES, greedy


@pytest.fixture(scope="module", params=["cohere2", "stablelm", "mamba2"])
def foreign(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / request.param
    return folder, tiny_foreign.write(folder, ARCHITECTURES[request.param])


@pytest.fixture
async def engine(foreign, tmp_path):
    engine = Engine(settings(foreign[0], tmp_path))
    await engine.start()
    yield engine
    await engine.stop()


async def test_a_model_without_a_graph_of_ours_is_served_by_mlx_lm_and_says_so(foreign, engine):
    assert engine.model.model_type == foreign[0].name
    assert engine.model.descriptor.id == f"mlx-lm:{foreign[0].name}"
    assert not engine.model.declaration.packed_segments
    started, ids, text, end = await run(engine, tokens(1, 10), max_tokens=6, eos_token_ids=())
    assert "one by one" in started.execution.reasons[0]
    assert len(ids) == 6
    assert end.stats.generated_tokens == 6
    assert end.stats.cache_tokens == (*tokens(1, 10).ids, *ids[:5])
    assert text


async def test_greedy_ids_in_company_equal_mlx_lms_own(foreign, engine):
    prompts = [tokens(seed, length) for seed, length in ((1, 1), (2, 9), (3, 30), (4, 64))]
    options = {"max_tokens": 24, "eos_token_ids": ()}
    found = await asyncio.gather(*(run(engine, prompt, **options) for prompt in prompts))
    for prompt, (_, ids, _, end) in zip(prompts, found, strict=True):
        assert ids == greedy(foreign[1], list(prompt.ids), 24)
        assert end.finish_reason is FinishReason.LENGTH


async def test_seeded_streams_in_company_equal_each_alone(engine):
    requests = [
        (tokens(seed, 3 + 7 * seed), {"temperature": 0.9, "seed": seed, "max_tokens": 12, "eos_token_ids": ()})
        for seed in range(4)
    ]
    alone = [(await run(engine, prompt, **options))[1] for prompt, options in requests]
    together = await asyncio.gather(*(run(engine, prompt, **options) for prompt, options in requests))
    assert [ids for _, ids, _, _ in together] == alone
    assert len({tuple(ids) for ids in alone}) == 4


async def test_a_cancelled_row_leaves_at_once_and_its_neighbour_goes_on(foreign, engine):
    options = {"max_tokens": 60, "eos_token_ids": ()}
    neighbour = asyncio.create_task(run(engine, tokens(5, 8), **options))
    generation = await engine.generate(
        GenerationRequest(prompt=tokens(6, 8), options=GenerateOptions(**options), request_id="x")
    )
    while not isinstance(await generation.next_event(), TokensGenerated):
        pass
    generation.abort(AbortReason.REQUESTED)
    _, _, _, end = await collect(generation)
    assert end.finish_reason is FinishReason.CANCELLED
    assert end.stats.generated_tokens < 60
    assert generation._row.caches == []
    assert (await neighbour)[1] == greedy(foreign[1], list(tokens(5, 8).ids), 60)


@pytest.mark.parametrize("name", ["cohere2", "stablelm", "mamba2"])
async def test_a_prompt_that_begins_like_an_earlier_one_begins_with_its_state(tmp_path, name):
    """From memory, and after a restart from disk."""
    oracle = tiny_foreign.write(tmp_path / "m", ARCHITECTURES[name] | {"max_position_embeddings": 512})
    kept = {"prefix_cache_bytes": None, "prefix_cache_dir": tmp_path / "kept"}
    options = {"max_tokens": 8, "eos_token_ids": ()}
    prompt = tokens(9, 300)
    longer = TokenPrompt((*prompt.ids, *greedy(oracle, list(prompt.ids), 8), 5, 6, 7))
    cached = []
    for asked in (prompt, longer, longer):
        engine = Engine(settings(tmp_path / "m", tmp_path, **kept))
        await engine.start()
        await run(engine, tokens(3, 3), max_tokens=1)
        assert await asyncio.to_thread(engine._thread._batch._prefixes._disk.wait_idle, 60)
        for _ in range(2):
            _, ids, _, end = await run(engine, asked, **options)
            assert ids == greedy(oracle, list(asked.ids), 8)
            cached.append(end.stats.cached_tokens)
        await engine.stop()
    assert cached[0] == 0
    assert min(cached[1:]) >= 299


async def test_a_durable_generation_goes_on_in_another_engine(foreign, tmp_path):
    """Its caches are mlx-lm's own, and come back whole."""
    asked = request(tokens(1, 30))
    engine = Engine(settings(foreign[0], tmp_path))
    await engine.start()
    await die_after(engine, asked, 20)
    engine = Engine(settings(foreign[0], tmp_path))
    await engine.start()
    (started, ids, _, _), known = await go_on(engine, asked)
    await engine.stop()
    assert started.resumed_tokens == len(known) >= 9
    assert ids == greedy(foreign[1], list(tokens(1, 30).ids), 60)


async def test_a_state_that_does_not_come_back_makes_generations_not_durable_by_name(foreign, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.models.foreign_state._fact", lambda node: f"{type(node).__name__} 0")
    engine = Engine(settings(foreign[0], tmp_path))
    await engine.start()
    with pytest.raises(UnsupportedOptionError, match=r"delivery\.durable .*state of this model's graph"):
        await engine.prepare(request(tokens(1, 5)))
    assert len((await run(engine, tokens(1, 5), max_tokens=3, eos_token_ids=()))[1]) == 3
    await engine.stop()
