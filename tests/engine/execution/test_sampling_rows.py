"""Sampling through the front door: a row is the same in any company, its echo repeats it, its faults are its own."""

import asyncio
import dataclasses
import itertools
import json

import pytest

from engine.contracts.errors import GenerationFailedError
from engine.contracts.events import GenerationRequest
from engine.contracts.options import GenerateOptions, ResolvedOptions
from engine.contracts.results import FinishReason
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.execution.driving import collect, run, settings, tokens
from tests.engine.execution.holding import held_after

LONG = {"max_tokens": 24, "eos_token_ids": ()}
POINTS = ((0.0, 0.0), (5.0, 30.0), (100.0, 60.0))
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-k and min-p": {"temperature": 1.1, "top_k": 9, "min_p": 0.02, "min_tokens_to_keep": 3},
    "XTC": {"temperature": 1.0, "xtc_probability": 0.7, "xtc_threshold": 0.02},
    "curve": {"curve": POINTS},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((65, 4.0), (66, -100.0))},
    "log-probabilities": {"temperature": 0.8, "logprobs": True, "top_logprobs": 4},
}


def request(number, **options):
    return GenerationRequest(
        prompt=tokens(number, 5 + number), options=GenerateOptions(**(LONG | {"seed": 3} | options))
    )


async def ids_of(engine, number, **options):
    return (await collect(await engine.generate(request(number, **options))))[1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_the_options_that_started_tells_give_the_same_tokens_again(engine, kind):
    started, ids, _, _ = await run(engine, tokens(2, 7), **(LONG | kind))
    told = {field.name: getattr(started.options, field.name) for field in dataclasses.fields(ResolvedOptions)}
    del told["seed_was_explicit"]
    again, repeated, _, _ = await run(engine, tokens(2, 7), **told)
    assert repeated == ids
    assert again.options == dataclasses.replace(started.options, seed_was_explicit=True)


async def test_every_kind_of_row_gives_the_same_ids_in_company_as_alone(engine):
    alone = [await ids_of(engine, seed, **kind) for seed, kind in enumerate(KINDS.values())]
    together = await asyncio.gather(*(ids_of(engine, seed, **kind) for seed, kind in enumerate(KINDS.values())))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(KINDS)


async def test_a_seeded_row_is_the_same_whoever_joins_whenever(engine):
    own = {"temperature": 0.8, "seed": 42, "top_p": 0.95}
    alone = await ids_of(engine, 1, **own)
    for others in ([{}], [{"temperature": 0.8}], [{"temperature": 0.8, "seed": 7}], [own, own], [{"top_k": 1}] * 6):
        late = [asyncio.create_task(ids_of(engine, 1, **one)) for one in others]
        for _ in range(3):
            await asyncio.sleep(0.002)
        assert await ids_of(engine, 1, **own) == alone
        await asyncio.gather(*late)


@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "penalised", "biased"])), ids="-".join)
async def test_what_one_row_asks_never_reaches_rows_that_join_after_or_beside_it(engine, order):
    options = {"plain": {}, "penalised": KINDS["penalties"] | {"temperature": 0.0}, "biased": KINDS["bias"]}
    alone = {name: await ids_of(engine, 4, **options[name]) for name in options}
    running = []
    for name in order:
        running.append((name, asyncio.create_task(ids_of(engine, 4, **options[name]))))
        await asyncio.sleep(0.004)
    leaving = await engine.generate(request(6, **KINDS["penalties"]))
    await asyncio.sleep(0.004)
    engine.abort(caller="", request_id=leaving.request_id)
    assert [await task for _, task in running] == [alone[name] for name in order]


@pytest.mark.parametrize("where", ["history", "processor", "sampler"])
async def test_a_row_whose_sampling_fails_ends_alone(engine, monkeypatch, where):
    kinds = [KINDS["greedy"], KINDS["top-p"], KINDS["penalties"]]
    wanted = [await ids_of(engine, seed, **kind) for seed, kind in enumerate(kinds)]
    with held_after(3):
        others = [asyncio.create_task(ids_of(engine, seed, **kind)) for seed, kind in enumerate(kinds)]
        bad = await engine.generate(request(9, **KINDS["drawn"]))
        if where == "history":
            monkeypatch.setattr(bad._row, "_newest_tokens", lambda count: 1 / 0)
        elif where == "processor":
            bad._row._recipe.bias_ids = [1, 2]
        else:
            bad._row._recipe.temperature = "warm"
    *_, end = await collect(bad)
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, GenerationFailedError)
    assert await asyncio.gather(*others) == wanted
    assert await ids_of(engine, 0) == wanted[0]


async def test_merged_events_keep_log_probabilities_with_their_tokens(engine):
    kind = KINDS["log-probabilities"]
    one_by_one = [token async for token in shown(await engine.generate(request(3, **kind)))]
    slow = await engine.generate(request(3, **kind))
    await slow.finished()
    merged = [token async for token in shown(slow)]
    assert merged == one_by_one
    assert [token.index for token in merged] == list(range(24))
    for token in merged:
        listed = {candidate.token: candidate.logprob for candidate in token.logprobs.top}
        assert listed[token.token] == token.logprobs.logprob


async def test_every_end_token_that_some_file_names_ends_every_request(tmp_path):
    ends = (tiny_model.END_OF_TEXT, tiny_model.TURN_END, 65)
    tiny_model.write(tmp_path / "tiny", eos=ends[:1])
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, ends[1], 65]}))
    engine = Engine(settings(tmp_path / "tiny", tmp_path))
    await engine.start()
    for end in ends * 2:
        bias = {"logit_bias": ((end, 1000.0),), "logprobs": True}
        started, ids, text, finished = await run(engine, tokens(1, 6), max_tokens=9, **bias)
        assert set(started.options.eos_token_ids) == set(ends)
        assert (ids, text, finished.finish_reason) == ([], "", FinishReason.STOP)
        assert finished.stats.generated_tokens == 1
    await engine.stop()


async def shown(generation):
    """The tokens of a generation as callers see them."""
    while True:
        event = await generation.next_event()
        if hasattr(event, "finish_reason"):
            return
        for token in getattr(event, "tokens", ()):
            yield token
