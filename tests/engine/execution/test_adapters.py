"""Adapters through the whole engine: selected by request, in company, and with kept prefixes."""

import asyncio

import pytest

from engine.contracts.errors import (
    ConfigurationError,
    EngineError,
    MismatchedArtifactError,
    NotFoundError,
)
from engine.contracts.option_groups import AdapterSelection
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.adapters import tiny_adapters
from tests.engine.execution.driving import run, settings, tokens
from tests.engine.models import tiny_foreign, tiny_llama

OPTIONS = {"max_tokens": 16, "eos_token_ids": ()}
PROMPT = tokens(3, 100)


def selected(*names, scale=None):
    return tuple(AdapterSelection(id=name, scale=scale) for name in names)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model folder, folders of its adapters a and b, and mlx-lm's ids for either and for neither."""
    root = tmp_path_factory.mktemp("adapted")
    ids = {(): tiny_model.write(root / "model", max_position_embeddings=512).greedy(list(PROMPT.ids), 16)}
    for seed, name in enumerate("ab", 1):
        oracle = tiny_model.write(root / "model", max_position_embeddings=512)
        write = tiny_adapters.write_mlx if name == "a" else tiny_adapters.write_peft
        write(root / name, tiny_adapters.adapt(oracle.model, seed=seed))
        ids[name,] = oracle.greedy(list(PROMPT.ids), 16)
    return root, ids


def serving(root, tmp_path, **changes):
    adapters = tuple((name, root / name) for name in "ab")
    return Engine(settings(root / "model", tmp_path, **({"adapters": adapters} | changes)))


async def test_each_request_gets_mlx_lms_ids_for_its_own_adapter_in_company(adapted, tmp_path):
    root, ids = adapted
    engine = serving(root, tmp_path)
    info = await engine.start()
    try:
        assert [adapter.id for adapter in info.adapters] == ["a", "b"]
        wanted = [(), ("a",), ("b",), ("a",), ()]
        runs = await asyncio.gather(*(run(engine, PROMPT, adapters=selected(*names), **OPTIONS) for names in wanted))
        assert [found for _, found, _, _ in runs] == [ids[names] for names in wanted]
        assert len({tuple(found) for found in ids.values()}) == 3
        stacked = [run(engine, PROMPT, adapters=selected(*names), **OPTIONS) for names in ("ab", "ab")]
        (started, first, _, _), (_, again, _, _) = await asyncio.gather(*stacked)
        assert first == again
        assert first not in ids.values()
        assert started.options.adapters == selected("a", "b")
    finally:
        await engine.stop()


async def test_an_adapter_that_is_not_mounted_is_refused_by_name_and_nothing_is_held(adapted, tmp_path):
    root, ids = adapted
    engine = serving(root, tmp_path)
    await engine.start()
    try:
        with pytest.raises(NotFoundError, match="no adapter named 'c'; known: a, b"):
            await run(engine, PROMPT, adapters=selected("a", "c"), **OPTIONS)
        assert (await run(engine, PROMPT, **OPTIONS))[1] == ids[()]
    finally:
        await engine.stop()


async def test_states_made_under_one_adapter_never_serve_another(adapted, tmp_path):
    root, _ = adapted
    wanted = [(), selected("a"), selected("b"), selected("a", scale=0.5), selected("a", "b")]
    cold, warm = serving(root, tmp_path), serving(root, tmp_path, prefix_cache_bytes=10**8)
    await cold.start()
    await warm.start()
    try:
        ids = [(await run(cold, PROMPT, adapters=adapters, **OPTIONS))[1] for adapters in wanted]
        first = [await run(warm, PROMPT, adapters=adapters, **OPTIONS) for adapters in wanted]
        second = [await run(warm, PROMPT, adapters=adapters, **OPTIONS) for adapters in wanted]
    finally:
        await cold.stop()
        await warm.stop()
    assert [found for _, found, _, _ in first] == [found for _, found, _, _ in second] == ids
    assert [end.stats.cached_tokens for *_, end in first] == [0] * len(wanted)
    assert all(end.stats.cached_tokens > 0 for *_, end in second)


async def test_a_new_file_under_an_old_name_begins_with_nothing_that_the_old_one_left_on_disk(adapted, tmp_path):
    root, _ = adapted
    kept = {"prefix_cache_bytes": 10**8, "prefix_cache_dir": tmp_path / "kept"}
    prompt, found = tokens(4, 300), {}
    for folder in ("a", "a", "b"):
        engine = serving(root, tmp_path, adapters=(("x", root / folder),), **kept)
        await engine.start()
        try:
            await run(engine, tokens(9, 4), **OPTIONS)
            assert await asyncio.to_thread(engine._thread._batch._prefixes._disk.wait_idle, 60)
            *_, end = await run(engine, prompt, adapters=selected("x"), **OPTIONS)
        finally:
            await engine.stop()
        found.setdefault(folder, []).append(end.stats.cached_tokens)
    assert found["a"][0] == 0
    assert found["a"][1] > 0
    assert found["b"] == [0]


async def refused(engine):
    with pytest.raises(EngineError) as failure:
        await engine.start()
    await engine.stop()
    return failure.value


async def test_a_model_does_not_start_with_an_adapter_that_does_not_fit_it(adapted, tmp_path):
    root, _ = adapted
    other = tiny_llama.write(tmp_path / "other", hidden_size=32)
    tiny_adapters.write_mlx(tmp_path / "bad", tiny_adapters.adapt(other.model))
    fault = await refused(serving(root, tmp_path, adapters=(("a", root / "a"), ("bad", tmp_path / "bad"))))
    assert isinstance(fault, MismatchedArtifactError)
    assert str(fault).startswith("bad/adapters.safetensors: does not fit the model: model.layers.0.mlp.down_proj")


async def test_a_graph_of_mlx_lm_takes_no_adapters_and_says_so(adapted, tmp_path):
    root, _ = adapted
    tiny_foreign.write(tmp_path / "stablelm", tiny_foreign.ARCHITECTURES["stablelm"])
    fault = await refused(Engine(settings(tmp_path / "stablelm", tmp_path, adapters=(("a", root / "a"),))))
    assert isinstance(fault, ConfigurationError)
    assert str(fault) == "adapters: a graph of mlx-lm takes no adapters"
