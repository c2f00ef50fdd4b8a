"""Changing the resident model while it serves: loads, failures, unloads, one at a time, and nothing left behind."""

import asyncio
import contextlib
import gc
import threading

import mlx.core as mx
import pytest

from engine.contracts.errors import (
    ArtifactError,
    GenerationAborted,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from engine.contracts.events import GenerationRequest
from engine.contracts.load import GenerationPhase, LoadPhase, LoadProgress
from engine.contracts.option_groups import CacheOptions
from engine.contracts.options import GenerateOptions
from engine.contracts.results import AbortReason, FinishReason
from engine.execution import residency
from engine.execution.engine import Engine
from engine.execution.packed_method import PackedMethod
from engine.generation.memory import usable_bytes
from tests.engine import tiny_model
from tests.engine.execution.driving import collect, run, settings, tokens
from tests.waiting import until

RELOADS = 50
PROMPT = tokens(3, 20)
GREEDY = {"eos_token_ids": ()}


@pytest.fixture
def changing(tmp_path):
    """A model folder of this test's own."""
    folder = tmp_path / "tiny"
    tiny_model.write(folder, max_position_embeddings=4096)
    return folder


@contextlib.asynccontextmanager
async def started(folder, tmp_path, **changes):
    engine = Engine(settings(folder, tmp_path, **changes))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def begun(engine, max_tokens=4000, **more):
    """A generation that has its first event."""
    request = GenerationRequest(prompt=PROMPT, options=GenerateOptions(max_tokens=max_tokens, **GREEDY), **more)
    generation = await engine.generate(request)
    await asyncio.wait_for(generation.next_event(), 60)
    return generation


async def test_a_new_model_answers_next_and_streams_of_the_old_one_end_as_they_would_have(changing, tmp_path):
    async with started(changing, tmp_path) as engine:
        wanted = (await run(engine, PROMPT, max_tokens=200, **GREEDY))[1]
        old = engine.model.fingerprint
        oracle = tiny_model.write(changing, max_position_embeddings=4096, seed=11)
        running = await begun(engine, max_tokens=200)
        info = await engine.load_model("")
        assert info.fingerprint != old
        assert engine.model is info
        assert (await run(engine, PROMPT, max_tokens=8, **GREEDY))[1] == oracle.greedy(list(PROMPT.ids), 8)
        assert (await collect(running))[1] == wanted
        await until(lambda: len(engine._thread._batches) == 1)


async def test_progress_tells_the_phases_of_a_load_in_order(changing, tmp_path):
    async with started(changing, tmp_path) as engine:
        told = []
        await engine.load_model("tiny", told.append)
        phases = list(dict.fromkeys(one.phase for one in told))
        assert phases == [LoadPhase.VALIDATING, LoadPhase.READING, LoadPhase.WARMING]
        read = [one for one in told if one.phase is LoadPhase.READING]
        assert [one.done_bytes for one in read] == sorted(one.done_bytes for one in read)
        assert 0 < read[-1].done_bytes <= read[-1].total_bytes


async def test_a_broken_load_leaves_the_old_model_serving_streams_included(changing, tmp_path):
    async with started(changing, tmp_path) as engine:
        wanted = (await run(engine, PROMPT, max_tokens=150, **GREEDY))[1]
        before = engine.model
        running = await begun(engine, max_tokens=150)
        weights = next(changing.glob("*.safetensors"))
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ArtifactError):
            await engine.load_model("")
        assert engine.model is before
        assert (await collect(running))[1] == wanted
        assert (await run(engine, PROMPT, max_tokens=150, **GREEDY))[1] == wanted
        weights.write_bytes(whole)
        await engine.load_model("")
        await until(lambda: len(engine._thread._batches) == 1)


async def test_a_load_that_fails_while_it_warms_leaves_the_old_model_serving(changing, tmp_path, monkeypatch):
    async with started(changing, tmp_path) as engine:
        before = engine.model

        def broken(method):
            raise RuntimeError("the kernel does not compile")

        with monkeypatch.context() as patch:
            patch.setattr(PackedMethod, "works", broken)
            with pytest.raises(RuntimeError, match="does not compile"):
                await engine.load_model("")
        assert engine.model is before
        assert (await run(engine, PROMPT, max_tokens=3, **GREEDY))[1]
        await engine.load_model("")


@pytest.mark.parametrize("reference", ["/etc", "../tiny", "./tiny", "no such model", "a/../b", "x.gguf", "~", "a\0b"])
async def test_a_caller_cannot_name_a_path(changing, tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    async with started(changing, tmp_path) as engine:
        before = engine.model
        with pytest.raises(NotFoundError) as failure:
            await engine.load_model(reference)
        assert str(tmp_path) not in str(failure.value)
        assert engine.model is before


async def test_one_load_at_a_time(changing, tmp_path, monkeypatch):
    go_on, entered, real = threading.Event(), threading.Event(), residency.find_files

    def slow(*arguments, **named):
        entered.set()
        assert go_on.wait(60)
        return real(*arguments, **named)

    async with started(changing, tmp_path) as engine:
        monkeypatch.setattr(residency, "find_files", slow)
        first = asyncio.create_task(engine.load_model(""))
        await asyncio.to_thread(entered.wait, 60)
        for change in (
            engine.load_model(""),
            engine.unload_model("tiny"),
            engine.mount_adapter("a", "a", model=""),
        ):
            with pytest.raises(OverloadedError, match="change of models"):
                await change
        assert (await run(engine, PROMPT, max_tokens=3, **GREEDY))[1]
        go_on.set()
        await first
        await engine.load_model("")


async def test_rows_keep_running_while_a_model_is_read(changing, tmp_path, monkeypatch):
    async with started(changing, tmp_path) as engine:
        running = await begun(engine)
        seen, real = [], engine._thread.breathe

        def watched():
            real()
            seen.append(engine.load().generated_tokens)

        monkeypatch.setattr(engine._thread, "breathe", watched)
        await engine.load_model("")
        assert seen[-1] > seen[0] + 3
        running.abort(AbortReason.REQUESTED)
        await running.finished()


async def leave_while_loading(engine, monkeypatch):
    """Ask for a load, and leave while it reads; it goes on."""
    reading, go_on, loop, real = asyncio.Event(), threading.Event(), asyncio.get_running_loop(), mx.load

    def slow(*arguments, **named):
        loop.call_soon_threadsafe(reading.set)
        go_on.wait(60)
        return real(*arguments, **named)

    monkeypatch.setattr("engine.artifacts.weights.mx.load", slow)
    load = asyncio.create_task(engine.load_model(""))
    await asyncio.wait_for(reading.wait(), 60)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    go_on.set()


async def test_a_load_whose_caller_leaves_ends_and_changes_nothing(changing, tmp_path, monkeypatch):
    async with started(changing, tmp_path) as engine:
        before = engine.model
        await leave_while_loading(engine, monkeypatch)
        await until(lambda: engine._residency._change.done())
        assert engine.model is before
        assert len(engine._thread._batches) == 1


async def test_a_load_whose_caller_leaves_is_no_fault_that_nobody_looked_at(changing, tmp_path, monkeypatch):
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    async with started(changing, tmp_path) as engine:
        await leave_while_loading(engine, monkeypatch)
        change = engine._residency._change
        await until(change.done)
        assert "exception=" in repr(change)  # asking for it would count as having looked
    del change
    engine._residency._change = None
    gc.collect()
    assert faults == []


async def test_a_fetch_whose_caller_leaves_gives_its_place_back_and_what_it_brings_is_ignored(
    changing, tmp_path, monkeypatch
):
    fetching, go_on, real = threading.Event(), threading.Event(), residency.find_files

    def slow(*arguments, progress, **named):
        fetching.set()
        assert go_on.wait(60)
        files = real(*arguments, progress=progress, **named)
        progress(LoadProgress(phase=LoadPhase.FETCHING))
        return files

    async with started(changing, tmp_path) as engine:
        monkeypatch.setattr(residency, "find_files", slow)
        told = []
        load = asyncio.create_task(engine.load_model("", told.append))
        await asyncio.to_thread(fetching.wait, 60)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        monkeypatch.setattr(residency, "find_files", real)
        await until(lambda: engine._residency._change.done())
        await engine.load_model("")
        assert not go_on.is_set()
        loaded = engine.model
        go_on.set()
        await until(lambda: not [one for one in threading.enumerate() if one.name.startswith("mlx-stream-load")])
        assert engine.model is loaded
        assert told == []


async def test_unloading_ends_generations_as_aborted_and_another_load_serves_again(changing, tmp_path):
    async with started(changing, tmp_path) as engine:
        running = [await begun(engine) for _ in range(2)]
        weights_bytes = engine.model.weights_bytes
        report = await engine.unload_model("tiny")
        assert report.aborted_generations == 2
        assert report.freed_bytes >= weights_bytes
        for generation in running:
            end = await generation.finished()
            assert end.finish_reason is FinishReason.CANCELLED
            assert isinstance(end.error, GenerationAborted)
        assert not engine.can_serve
        with pytest.raises(UnavailableError, match="no model is loaded"):
            await run(engine, PROMPT, max_tokens=2)
        with pytest.raises(UnavailableError, match="no model is loaded"):
            await engine.unload_model("tiny")
        assert engine.load().row_limit == 0
        await engine.load_model("tiny")
        assert engine.can_serve
        assert (await run(engine, PROMPT, max_tokens=3, **GREEDY))[1]


async def test_unloading_a_new_model_ends_none_of_the_streams_of_the_one_that_it_has_replaced(changing, tmp_path):
    async with started(changing, tmp_path) as engine:
        old = await begun(engine)
        await engine.load_model("")
        new = await begun(engine)
        assert len(engine.live_generations()) == 2
        report = await engine.unload_model("tiny")
        assert report.aborted_generations == 1
        assert (await new.finished()).finish_reason is FinishReason.CANCELLED
        (before,) = engine.live_generations()
        assert before.generation_id == old.generation_id
        await until(lambda: old.status().generated_tokens > before.generated_tokens + 10)
        assert old.aborted_at is None
        old.abort(AbortReason.REQUESTED)
        await old.finished()


async def test_rows_of_a_replaced_model_fill_no_queue_while_the_new_one_has_rows(changing, tmp_path):
    async with started(changing, tmp_path, max_rows=2, max_queue=1) as engine:
        generations = [await begun(engine) for _ in range(2)]
        await engine.load_model("")
        generations += [await begun(engine) for _ in range(2)]
        load = engine.load()
        assert (load.running, load.queued) == (4, 0)
        options = GenerateOptions(max_tokens=3)
        generations.append(await engine.generate(GenerationRequest(prompt=PROMPT, options=options)))
        with pytest.raises(OverloadedError, match="the queue"):
            await engine.generate(GenerationRequest(prompt=PROMPT, options=options))
        for generation in generations:
            generation.abort(AbortReason.REQUESTED)


async def test_a_replaced_model_leaves_its_room_to_the_next(changing, tmp_path):
    async with started(changing, tmp_path, prefix_cache_bytes=None) as engine:
        info = await engine.load_model("")
        room = usable_bytes(info.weights_bytes)
        before = engine.load()
        await until(lambda: not engine._residency._retirements)
        after = engine.load()
        assert after.state_limit_bytes - before.state_limit_bytes in (0, room)  # it may have gone before we looked
        assert engine._residency.current.state_bytes == after.state_limit_bytes
        assert after.prefix_limit_bytes >= int(0.24 * after.state_limit_bytes)


async def test_a_model_is_loaded_and_warmed_on_the_one_thread_that_owns_arrays(changing, tmp_path, monkeypatch):
    names, real = [], PackedMethod.works

    def watched(method):
        names.append(threading.current_thread().name)
        return real(method)

    async with started(changing, tmp_path) as engine:
        monkeypatch.setattr(PackedMethod, "works", watched)
        await engine.load_model("")
        await asyncio.gather(engine.load_model(""), run(engine, PROMPT, max_tokens=3, **GREEDY))
    assert names == ["mlx-engine"] * 2


async def test_only_the_served_model_can_be_unloaded(engine):
    with pytest.raises(NotFoundError, match="no model named 'other'"):
        await engine.unload_model("other")
    assert engine.can_serve


async def test_memory_is_flat_over_fifty_reloads(changing, tmp_path):
    async with started(changing, tmp_path, prefix_cache_bytes=10**6) as engine:
        held, before = [], set(threading.enumerate())
        for _ in range(RELOADS):
            await engine.load_model("")
            await until(lambda: not engine._residency._retirements)
            held.append(mx.get_active_memory())
        assert max(held[1:]) - min(held[1:]) < engine.model.weights_bytes // 4, held
        await until(lambda: len(set(threading.enumerate()) - before) <= 3)


async def test_weights_that_do_not_fit_beside_the_served_model_are_refused_before_any_is_read(
    changing, tmp_path, monkeypatch
):
    async with started(changing, tmp_path) as engine:
        before = engine.model
        monkeypatch.setattr(type(engine._residency._runtime.memory), "fits", lambda self, size: False)
        with pytest.raises(Exception, match=r"weights of tiny would take \d+ bytes beside the served model"):
            await engine.load_model("")
        assert engine.model is before


async def test_stopping_in_the_middle_of_a_load_ends_both(changing, tmp_path):
    engine = Engine(settings(changing, tmp_path))
    await engine.start()
    load = asyncio.create_task(engine.load_model(""))
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(UnavailableError):
        await load
    with pytest.raises(UnavailableError):
        await engine.load_model("")


async def test_the_live_generations_are_told_oldest_first_with_what_they_do(changing, tmp_path):
    async with started(changing, tmp_path, max_rows=1) as engine:
        first = await begun(engine, request_id="first")
        queued = await engine.generate(
            GenerationRequest(prompt=tokens(1, 5), options=GenerateOptions(max_tokens=3), request_id="second")
        )
        await until(lambda: engine.live_generations()[0].generated_tokens > 0)
        one, two = engine.live_generations()
        assert (one.request_id, one.phase, one.model) == ("first", GenerationPhase.DECODING, "tiny")
        assert (one.prompt_tokens, one.prefilled_tokens) == (20, 20)
        assert (two.request_id, two.phase, two.generated_tokens) == ("second", GenerationPhase.QUEUED, 0)
        load = engine.load()
        assert (load.running, load.queued, load.row_limit) == (1, 1, 1)
        assert 0 < load.state_share <= 1
        first.abort(AbortReason.REQUESTED)
        await first.finished()
        await queued.finished()
        assert engine.live_generations() == []
        await until(lambda: engine.load().running == 0)
        assert engine.load().state_share == 0


async def test_steps_and_tokens_are_counted(engine):
    before = engine.load()
    await run(engine, tokens(1, 30), max_tokens=5, **GREEDY)
    after = engine.load()
    assert after.generated_tokens - before.generated_tokens == 5
    assert after.prefilled_tokens - before.prefilled_tokens == 30
    assert after.packed_tokens - before.packed_tokens >= 34
    assert sum(after.step_tokens) == after.steps


async def test_forgotten_prefixes_are_computed_again_and_those_of_other_salts_stay(changing, tmp_path):
    async with started(changing, tmp_path, prefix_cache_bytes=10**8) as engine:
        prompt = tokens(5, 300)

        async def cached(salt=""):
            *_, end = await run(engine, prompt, max_tokens=2, cache=CacheOptions(salt=salt), **GREEDY)
            return end.stats.cached_tokens

        for salt in ("", "s"):
            await cached(salt)
            assert await cached(salt) > 0
        report = await engine.clear_prefixes(model="", salt="s")
        assert report.cleared_entries > 0
        assert report.freed_bytes > 0
        assert await cached("") > 0
        assert await cached("s") == 0
        await engine.clear_prefixes(model="", salt=None)
        assert engine.load().prefix_bytes == 0
        assert await cached("") == 0
