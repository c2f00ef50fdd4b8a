"""Engines that stop in the middle of a durable generation, and others on the same folder that go on with it."""

import asyncio

from engine.contracts.durability import Continuation
from engine.contracts.events import GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from tests.engine.execution.driving import collect
from tests.engine.execution.holding import held_after

EVERY_TOKENS = 8


def request(prompt, **options):
    values = {"max_tokens": 60, "eos_token_ids": (), "checkpoint_every_tokens": EVERY_TOKENS} | options
    return GenerationRequest(prompt=prompt, options=GenerateOptions(**values))


async def begun(engine, asked):
    acceptance = await engine.prepare(asked)
    folder = engine.durable_store.create(acceptance.generation_id, acceptance.checkpoint_key)
    return engine.begin(asked, acceptance, folder), folder, acceptance


async def die_after(engine, asked, count):
    """Begin, and stop the engine once it has told so many tokens and little more; returns their ids."""
    with held_after(count):
        generation, folder, acceptance = await begun(engine, asked)
        ids = []
        while len(ids) < count:
            event = await asyncio.wait_for(generation.next_event(), 60)
            if isinstance(event, TokensGenerated):
                ids += [token.token for token in event.tokens]
        assert await asyncio.to_thread(engine.durable_store.wait_idle, 60)
        await engine.stop()
    folder.release()
    return ids, acceptance


async def go_on(engine, asked, *, generated=None):
    """As the identical request does, or with the tokens that a log holds."""
    acceptance = await engine.prepare(asked)
    kept = engine.durable_store.find(acceptance.checkpoint_key)
    facts = kept.require_good()
    assert facts.identity == acceptance.identity
    known = facts.tokens[facts.prompt_tokens :] if generated is None else tuple(generated)
    continuation = Continuation(generated=known, seed=facts.seed, state=kept.state)
    acceptance = acceptance.continuing(kept.folder.generation_id, continuation)
    generation = engine.begin(asked, acceptance, kept.folder, continuation)
    outcome = await collect(generation)
    kept.folder.remove(leave_mark=False)
    return outcome, known


def plain_options(asked):
    """Those of `asked`, but for what only durable generations have."""
    names = [name for name in GenerateOptions.__slots__ if name != "checkpoint_every_tokens"]
    return {name: getattr(asked.options, name) for name in names}
