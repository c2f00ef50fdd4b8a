"""Durable generations through the front door: engines that die, and others that go on where they stood."""

import asyncio
from dataclasses import replace

import pytest

from engine.contracts.durability import Continuation
from engine.contracts.errors import DuplicateRequestError, InvalidRequestError, UnsupportedOptionError
from engine.contracts.events import TokensGenerated
from engine.contracts.results import AbortReason, FinishReason
from engine.execution.beginning import NOT_KEPT
from engine.execution.engine import Engine
from tests.engine.execution.driving import collect, run, settings, tokens
from tests.engine.execution.dying import EVERY_TOKENS, begun, die_after, go_on, plain_options, request
from tests.engine.execution.holding import held_after

ASKED = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "penalised": {
        "temperature": 0.7,
        "seed": 11,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "frequency_context_size": 0,
    },
    "biased": {"temperature": 1.3, "top_k": 40, "xtc_probability": 0.5, "seed": 4, "logit_bias": ((65, 2.0),)},
}


@pytest.fixture
def start(folder, tmp_path):
    """Makes engines one after the other over one state folder; each is stopped in the end."""
    engines = []

    async def start_engine(**changes):
        engine = Engine(settings(folder, tmp_path, **changes))
        await engine.start()
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        assert engine.state.value in ("stopped", "failed"), "a test stops its engines"


@pytest.mark.parametrize("name", ASKED)
async def test_the_identical_request_goes_on_in_another_engine(start, name):
    asked = request(tokens(1, 50), **ASKED[name])
    engine = await start()
    wanted = await run(engine, tokens(1, 50), **plain_options(asked))
    told, first = await die_after(engine, asked, 21)
    assert told == wanted[1][: len(told)]
    engine = await start()
    (started, ids, text, finished), known = await go_on(engine, asked)
    assert started.generation_id == first.generation_id
    assert started.resumed_tokens == len(known)
    assert EVERY_TOKENS < len(known) <= len(told) + 2
    assert (ids, text) == (wanted[1], wanted[2])
    assert (finished.finish_reason, finished.stats.generated_tokens) == (FinishReason.LENGTH, 60)
    await engine.stop()


async def test_a_seed_that_the_server_chose_goes_on_too(start):
    asked = request(tokens(1, 50), temperature=1.0)
    engine = await start()
    told, first = await die_after(engine, asked, 21)
    engine = await start()
    (started, ids, _, _), _ = await go_on(engine, asked)
    assert started.options.seed == first.options.seed
    assert not started.options.seed_was_explicit
    assert ids[: len(told)] == told
    again = await run(engine, tokens(1, 50), max_tokens=60, eos_token_ids=(), temperature=1.0, seed=first.options.seed)
    assert ids == again[1]
    await engine.stop()


async def test_tokens_of_a_log_are_never_drawn_again(start):
    """The log may be longer than the newest checkpoint, or shorter: what it says stands."""
    asked = request(tokens(1, 50), **ASKED["drawn"])
    engine = await start()
    told, _ = await die_after(engine, asked, 27)
    engine = await start()
    (started, ids, _, _), _ = await go_on(engine, asked, generated=told)
    assert started.resumed_tokens == len(told)
    wanted = await run(engine, tokens(1, 50), max_tokens=60, eos_token_ids=(), **ASKED["drawn"])
    assert ids == wanted[1]
    await engine.stop()


@pytest.mark.parametrize("count", [0, 1, 5, 8])
async def test_a_log_that_has_lost_its_end_is_gone_on_from_without_the_state_of_what_it_lost(start, count):
    asked = request(tokens(1, 50), **ASKED["penalised"])
    engine = await start()
    told, _ = await die_after(engine, asked, 21)
    engine = await start()
    (started, ids, _, _), _ = await go_on(engine, asked, generated=told[:count])
    assert started.resumed_tokens == count
    wanted = await run(engine, tokens(1, 50), max_tokens=60, eos_token_ids=(), **ASKED["penalised"])
    assert ids == wanted[1]
    await engine.stop()


@pytest.mark.parametrize("cut", [0, 1, 2])
async def test_a_stop_sequence_is_met_wherever_the_generation_was_cut(start, cut):
    engine = await start()
    whole = (await run(engine, tokens(1, 50), max_tokens=60, eos_token_ids=(), **ASKED["drawn"]))[2]
    place = next(place for place in range(18 - cut, 40) if whole.count(whole[place : place + 4]) == 1)
    stop = whole[place : place + 4]
    asked = request(tokens(1, 50), stop_sequences=(stop,), **ASKED["drawn"])
    wanted = await run(engine, tokens(1, 50), **plain_options(asked))
    assert wanted[3].matched_stop == stop
    count = min(17 + cut, len(wanted[1]) - 1)
    await die_after(engine, asked, count)
    engine = await start()
    (_, ids, text, finished), _ = await go_on(engine, asked)
    assert (ids, text, finished.matched_stop) == (wanted[1], wanted[2], stop)
    await engine.stop()


async def test_known_tokens_that_reach_the_end_end_it_and_nothing_is_computed(start, monkeypatch):
    """A crash after the last token, and before anybody was told of the end."""
    asked = request(tokens(1, 50), max_tokens=20)
    engine = await start()
    wanted = await run(engine, tokens(1, 50), max_tokens=20, eos_token_ids=())
    monkeypatch.setattr(engine._thread, "submit", lambda _: pytest.fail("nothing is left to compute"))
    acceptance = await engine.prepare(asked)
    continuation = Continuation(generated=tuple(wanted[1]), seed=0)
    generation = engine.begin(asked, acceptance.continuing("0" * 32, continuation), None, continuation)
    started, ids, text, finished = await collect(generation)
    assert (ids, text) == (wanted[1], wanted[2])
    assert (started.resumed_tokens, finished.finish_reason) == (20, FinishReason.LENGTH)
    monkeypatch.undo()
    await engine.stop()


async def test_whether_it_is_durable_is_told(start):
    engine = await start()
    generation, folder, _ = await begun(engine, request(tokens(1, 5), max_tokens=2))
    started = (await collect(generation))[0]
    assert started.execution.checkpoint
    folder.remove(leave_mark=False)
    asked = request(tokens(1, 5), max_tokens=2)
    started = (await collect(engine.begin(asked, await engine.prepare(asked), None)))[0]
    assert not started.execution.checkpoint
    assert NOT_KEPT in started.execution.reasons
    started = (await run(engine, tokens(1, 5), max_tokens=2))[0]
    assert not started.execution.checkpoint
    assert NOT_KEPT not in started.execution.reasons
    await engine.stop()


async def test_what_cannot_be_durable_is_refused_by_name(start):
    engine = await start(checkpoint_bytes=0)
    with pytest.raises(UnsupportedOptionError, match=r"delivery\.durable is not supported: .*checkpoint_bytes is 0"):
        await engine.prepare(request(tokens(1, 5)))
    with pytest.raises(UnsupportedOptionError, match=r"delivery\.durable"):
        _ = engine.durable_store
    with pytest.raises(InvalidRequestError, match=r"checkpoint_every_tokens: has no meaning unless delivery\.durable"):
        await engine.generate(request(tokens(1, 5)))
    await engine.stop()


async def test_a_request_id_in_use_is_refused_where_a_generation_begins_and_not_where_its_twin_is_looked_for(start):
    engine = await start()
    asked = replace(request(tokens(1, 9), max_tokens=40), request_id="mine")
    first, again = [await engine.prepare(asked) for _ in range(2)]
    generation = engine.begin(asked, first)
    assert (await engine.prepare(asked)).checkpoint_key == first.checkpoint_key
    with pytest.raises(DuplicateRequestError, match="mine"):
        engine.begin(asked, again)
    await collect(generation)
    await engine.stop()


async def test_equal_requests_have_one_key_and_others_their_own(start):
    engine = await start()
    first, second = [await engine.prepare(request(tokens(1, 9), checkpoint_every_tokens=every)) for every in (8, None)]
    assert first.checkpoint_key == second.checkpoint_key
    assert first.generation_id != second.generation_id
    assert (first.every_tokens, second.every_tokens) == (8, 64)
    other = await engine.prepare(request(tokens(1, 9), temperature=0.5))
    assert other.checkpoint_key != first.checkpoint_key
    assert engine.durable_identity(request(tokens(1, 9))) == first.identity
    await engine.stop()


async def test_another_form_of_storage_has_the_key_and_not_the_identity(start):
    engine = await start()
    asked = request(tokens(1, 50))
    _, first = await die_after(engine, asked, 20)
    engine = await start(kv_storage="paged")
    acceptance = await engine.prepare(asked)
    assert acceptance.checkpoint_key == first.checkpoint_key
    kept = engine.durable_store.find(acceptance.checkpoint_key)
    assert kept.facts.identity.differences(acceptance.identity) == ("kv_storage", "arithmetic")
    kept.folder.release()
    await engine.stop()


async def test_a_cancelled_generation_keeps_its_checkpoints_and_one_that_ended_does_not(start):
    engine = await start()
    with held_after(20):
        generation, folder, _ = await begun(engine, request(tokens(1, 50)))
        told = 0
        while told < 20:
            event = await asyncio.wait_for(generation.next_event(), 60)
            told += len(event.tokens) if isinstance(event, TokensGenerated) else 0
        generation.abort(AbortReason.DISCONNECTED)
        assert (await generation.finished()).finish_reason is FinishReason.CANCELLED
    assert engine.durable_store.wait_idle(60)
    assert list(folder.path.iterdir())
    folder.remove(leave_mark=False)
    generation, folder, _ = await begun(engine, request(tokens(1, 50)))
    await collect(generation)
    assert engine.durable_store.wait_idle(60)
    assert list(folder.path.iterdir()) == []
    folder.remove(leave_mark=False)
    await engine.stop()
