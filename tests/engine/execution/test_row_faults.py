"""Whatever fails in one row of four ends that row at most: the others answer as alone, and the engine serves on.

Every method and property of a row is walked, by either method of generation, and what is kept of rows for others.
"""

import asyncio
import contextlib
from unittest import mock

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import EngineFailedError, GenerationAborted, GenerationFailedError
from engine.contracts.events import GenerationRequest
from engine.contracts.option_groups import DenoisingOptions
from engine.contracts.options import GenerateOptions
from engine.execution.accepting import Acceptance
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.engine import Engine, EngineState
from engine.execution.prefixes import PrefixKeeper
from engine.execution.stepper import MethodStepper
from engine.generation.denoising_row import DenoisingRow
from engine.generation.row import Row
from engine.generation.text import TextAssembler
from tests.engine import tiny_denoiser
from tests.engine.execution.driving import collect, settings, tokens
from tests.engine.execution.holding import held
from tests.engine.execution.thread_harness import FakeCache, Harness, end_of
from tests.waiting import until

PROMPTS = [tokens(seed, 20) for seed in range(1, 5)]
VICTIM = 1
ENDS_WELL = {"close"}
"""What fails only after a row has said all that it had to say."""
TOLD_FIRST = 2
"""Tokens after which a fault, an abort or a failed step comes, unless it comes at once."""


@pytest.fixture(scope="module", params=["autoregressive", "denoising"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def model_folder(method, folder, tmp_path_factory):
    if method == "autoregressive":
        return folder
    denoiser_folder = tmp_path_factory.mktemp("denoiser") / "tiny"
    tiny_denoiser.write(denoiser_folder)
    return denoiser_folder


@pytest.fixture
def options(method):
    values = {"max_tokens": 10, "eos_token_ids": (), "seed": 3, "stop_sequences": ("never said",)}
    few = DenoisingOptions(max_denoising_steps=2, min_canvas_length=4, max_canvas_length=4)
    return GenerateOptions(**values, **({} if method == "autoregressive" else {"denoising": few}))


@pytest.fixture
def row_class(method):
    return Row if method == "autoregressive" else DenoisingRow


@pytest.fixture
async def serving(model_folder, tmp_path):
    engine = Engine(settings(model_folder, tmp_path))
    await engine.start()
    yield engine
    await engine.stop()


def is_victim(row):
    return row.prompt == PROMPTS[VICTIM].ids


def told(row):
    return len(row._completion.tokens)


@contextlib.contextmanager
def failing(kind, name, fails):
    """Have what `kind` calls `name` raise where `fails` is true of its first argument; gives how often it did."""
    real, calls = vars(kind)[name], []

    def work(self, *arguments, **named):
        if fails(self, *arguments):
            calls.append(name)
            raise RuntimeError(f"a fault in {name}")
        return real.fget(self) if isinstance(real, property) else real(self, *arguments, **named)

    with mock.patch.object(kind, name, property(work) if isinstance(real, property) else work):
        yield calls


@contextlib.contextmanager
def failing_once():
    """Have one step fail that holds the victim, which has said something: all rows are rebuilt."""
    real, failed = MethodStepper.dispatch, []

    def dispatch(stepper, rows, after):
        if not failed and any(is_victim(row) and told(row) >= TOLD_FIRST for row in rows):
            failed.append(rows)
            raise RuntimeError("a step fails once")
        return real(stepper, rows, after)

    with mock.patch.object(MethodStepper, "dispatch", dispatch):
        yield failed


def names_of(kind):
    return [name for name, what in vars(kind).items() if not name.startswith("_") and not isinstance(what, type)]


async def begun(engine, prompt, options):
    return await engine.generate(GenerationRequest(prompt=prompt, options=options))


async def together(engine, options, *, cancels=False):
    """Ids and end of each of the four; the victim is cancelled with something said if asked for."""
    generations = [await begun(engine, prompt, options) for prompt in PROMPTS]
    if cancels:
        victim = generations[VICTIM]
        ended = asyncio.ensure_future(victim.finished())
        await until(lambda: told(victim._row) >= TOLD_FIRST or ended.done())
        victim.abort(AbortReason.REQUESTED)
        await ended
    return [(ids, end) for _, ids, _, end in [await collect(generation) for generation in generations]]


async def require_sound(engine, name):
    assert engine.state is EngineState.READY, name
    await until(lambda: not (engine.load().running or engine.load().queued))
    assert engine.load().state_bytes == 0, name


def check(name, found, alone, *, is_ended):
    for index, (ids, end) in enumerate(found):
        if index != VICTIM:
            assert (end.error, ids) == (None, alone[index]), name
    ids, end = found[VICTIM]
    if is_ended:
        assert isinstance(end.error, GenerationFailedError), (name, end)
        assert alone[VICTIM][: len(ids)] == ids, name


async def walk(engine, row_class, options, *, after=0, around=contextlib.nullcontext, cancels=False):
    """Each of the row's methods fails for the victim in turn; returns which of them were called at all."""
    alone = [(await collect(await begun(engine, prompt, options)))[1] for prompt in PROMPTS]
    called = set()
    for name in names_of(row_class):
        if not callable(vars(row_class)[name]) and not isinstance(vars(row_class)[name], property):
            continue
        with around(), failing(row_class, name, lambda row, *_: is_victim(row) and told(row) >= after) as calls:
            found = await together(engine, options, cancels=cancels)
            await require_sound(engine, name)
        called |= set(calls)
        left_before_the_trial = cancels and isinstance(found[VICTIM][1].error, GenerationAborted)
        must_end = name in ("aborted", "stats") if left_before_the_trial else name not in ENDS_WELL
        check(name, found, alone, is_ended=bool(calls) and must_end)
    return called


@pytest.mark.parametrize("after", [0, TOLD_FIRST])
async def test_a_fault_in_any_part_of_a_row_ends_that_row_alone(serving, row_class, options, after):
    called = await walk(serving, row_class, options, after=after)
    assert called >= {"receive", "stats", "position", "is_prefilling", "limit_next_unit", "close"}
    assert after or called >= {"admit", "unfed_tokens", "next_width", "next_unit"}


async def test_a_fault_while_rows_are_rebuilt_after_a_failed_step_ends_that_row_alone(serving, row_class, options):
    called = await walk(serving, row_class, options, after=TOLD_FIRST, around=failing_once)
    assert called >= {"restart", "position"}


async def test_a_fault_while_a_row_is_cancelled_ends_that_row_alone(serving, row_class, options):
    def around():
        return held(lambda row: is_victim(row) and told(row) >= TOLD_FIRST)

    called = await walk(serving, row_class, options, after=TOLD_FIRST, around=around, cancels=True)
    assert called >= {"aborted", "stats"}


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_fault_in_a_rows_text_ends_that_row_alone(serving, options, cancels):
    alone = [(await collect(await begun(serving, prompt, options)))[1] for prompt in PROMPTS]
    real = Acceptance._text

    def text(acceptance):
        made = real(acceptance)
        made.__class__ = Victims if tuple(acceptance.prompt_ids) == PROMPTS[VICTIM].ids else TextAssembler
        return made

    class Victims(TextAssembler):
        __slots__ = ()

        def finish(self):
            raise RuntimeError("the detokenizer breaks")

    waits = held(lambda row: cancels and is_victim(row) and told(row) >= TOLD_FIRST)
    with waits, mock.patch.object(Acceptance, "_text", text):
        found = await together(serving, options, cancels=cancels)
        await require_sound(serving, "finish")
    check("finish", found, alone, is_ended=True)


async def test_a_fault_in_what_is_kept_of_a_row_costs_no_answer(folder, tmp_path):
    options = GenerateOptions(max_tokens=10, eos_token_ids=())
    engine = Engine(settings(folder, tmp_path, prefix_cache_bytes=10**7))
    await engine.start()
    try:
        alone = [(await collect(await begun(engine, prompt, options)))[1] for prompt in PROMPTS]
        walked = [(PrefixKeeper, name) for name in ("awaits", "begin", "stops", "watch", "confirm", "keep", "forget")]
        walked += [(CheckpointKeeper, name) for name in ("watch", "confirm", "finish", "forget")]
        for keeper, name in walked:
            with failing(keeper, name, lambda _keeper, *_: True) as calls:
                found = await together(engine, options)
                await require_sound(engine, name)
            assert calls, name
            assert [(end.error, ids) for ids, end in found] == [(None, ids) for ids in alone], name
    finally:
        await engine.stop()


class FailingTwice(FakeCache):
    def close(self):
        super().close()
        raise RuntimeError("a state cannot be let go of")


@pytest.mark.parametrize("cache", [FakeCache, FailingTwice])
async def test_the_state_of_a_row_that_cannot_be_admitted_is_let_go_of(cache):
    harness, made = Harness(), [cache(), cache()]
    harness.stepper.make_caches = lambda: made
    harness.thread.start()
    with mock.patch("tests.engine.execution.thread_harness.FakeRow.admit", side_effect=RuntimeError("no")):
        job, _ = harness.submit()
        assert isinstance((await end_of(job)).error, GenerationFailedError)
    await harness.stop()
    assert [one.closed for one in made] == [True, True]
    assert harness.stepper.ended_generations == 1
    await until(lambda: harness.ends == [None])


async def test_where_the_device_is_gone_as_a_row_is_admitted_it_hears_so_and_the_engine_ends():
    harness = Harness()
    harness.stepper.dead = True
    harness.thread.start()
    with mock.patch("tests.engine.execution.thread_harness.FakeRow.admit", side_effect=RuntimeError("no")):
        job, _ = harness.submit()
        assert isinstance((await end_of(job)).error, GenerationFailedError)
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], EngineFailedError)


async def test_a_row_that_is_being_admitted_as_the_thread_dies_hears_of_it():
    harness = Harness()
    harness.thread.start()
    with mock.patch("tests.engine.execution.thread_harness.FakeRow.admit", side_effect=SystemExit):
        job, _ = harness.submit()
        assert isinstance((await end_of(job)).error, EngineFailedError)
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], EngineFailedError)


async def test_a_dying_engine_tells_everybody_although_a_row_cannot_tell_its_statistics():
    harness = Harness()
    harness.stepper.faults, harness.stepper.dead, harness.stepper.gated = 1, True, True
    harness.thread.start()
    jobs = [harness.submit()[0] for _ in range(4)]
    jobs[1].row.finished = mock.Mock(side_effect=RuntimeError("no statistics"))
    harness.stepper.gate.release(1000)
    for job in jobs:
        assert isinstance((await end_of(job)).error, EngineFailedError)
    await until(lambda: harness.ends)
    assert isinstance(harness.ends[0], EngineFailedError)
