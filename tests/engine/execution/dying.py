"""Engines that stop in the middle of a durable generation, and others on the same folder that go on with it."""

import asyncio
import contextlib
import threading
from unittest import mock

from engine.contracts.durability import Continuation
from engine.contracts.events import GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.execution.stepper import MethodStepper
from tests.engine.execution.driving import collect

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
    with held_after(count) as gate:
        generation, folder, acceptance = await begun(engine, asked)
        ids = []
        while len(ids) < count:
            event = await asyncio.wait_for(generation.next_event(), 30)
            if isinstance(event, TokensGenerated):
                ids += [token.token for token in event.tokens]
        engine.durable_store.wait_idle(10)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping
    folder.release()
    return ids, acceptance


@contextlib.contextmanager
def held_after(count):
    """Rows of any engine come to a stand once they have so many tokens, until the event is set."""
    gate, real = threading.Event(), MethodStepper.dispatch

    def dispatch(stepper, rows, after):
        if any(row.next_index >= count for row in rows):
            gate.wait(30)
        return real(stepper, rows, after)

    with mock.patch.object(MethodStepper, "dispatch", dispatch):
        yield gate


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
