"""An engine's life: load, aborts, faults, stop; nothing is lost and nothing is left behind."""

import asyncio
import threading

import mlx.core as mx
import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    ArtifactError,
    EngineFailedError,
    GenerationAborted,
    GenerationFailedError,
    NotFoundError,
    UnavailableError,
)
from engine.contracts.events import GenerationRequest
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution import packed_method
from engine.execution.engine import Engine, EngineState
from tests.engine import tiny_model
from tests.engine.execution.driving import run, settings, tokens
from tests.engine.execution.holding import held, held_after
from tests.waiting import until


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (AbortReason.REQUESTED, FinishReason.CANCELLED),
        (AbortReason.DISCONNECTED, FinishReason.CANCELLED),
        (AbortReason.DEADLINE, FinishReason.DEADLINE),
    ],
)
@pytest.mark.parametrize("after_events", [0, 1, 2, 4])
async def test_an_abort_at_any_moment_ends_with_statistics(engine, reason, kind, after_events):
    told = 0
    with held(lambda row: row.position > 5 * told):  # each event brings about the next one, and no more
        generation = await engine.generate(
            GenerationRequest(
                prompt=tokens(1, 100),
                options=GenerateOptions(max_tokens=1000, eos_token_ids=(), prefill_chunk_size=5),
            )
        )
        while told < after_events:
            await asyncio.wait_for(generation.next_event(), 60)
            told += 1
        generation.abort(reason)
        end = await asyncio.wait_for(generation.finished(), 60)
    assert end.finish_reason is kind
    assert isinstance(end.error, GenerationAborted)
    assert end.error.abort_reason is reason
    assert end.stats.prompt_tokens == 100


async def test_a_storm_of_aborts_leaves_nothing_behind(engine):
    async def one(index):
        generation = await engine.generate(
            GenerationRequest(prompt=tokens(index, 20), options=GenerateOptions(max_tokens=100, eos_token_ids=()))
        )
        await asyncio.sleep(0.0005 * (index % 11))
        generation.abort(AbortReason.DISCONNECTED)
        return await asyncio.wait_for(generation.finished(), 60)

    ends = await asyncio.gather(*(one(index) for index in range(60)))
    assert {end.finish_reason for end in ends} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert len(engine._live) == 0
    assert len(engine._thread._batch) == 0
    assert (await run(engine, tokens(1, 4), max_tokens=2, eos_token_ids=()))[1]


async def test_stop_ends_running_streams_as_unavailable_and_is_idempotent(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    with held_after(2):
        generation = await engine.generate(
            GenerationRequest(prompt=tokens(1, 20), options=GenerateOptions(max_tokens=1000, eos_token_ids=()))
        )
        await engine.stop()
    assert isinstance((await generation.finished()).error, UnavailableError)
    await engine.stop()
    assert engine.state is EngineState.STOPPED
    with pytest.raises(UnavailableError):
        await engine.generate(GenerationRequest(prompt=tokens(1, 2), options=GenerateOptions()))


async def test_before_the_model_is_ready_everything_is_unavailable(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    with pytest.raises(UnavailableError, match="loading"):
        _ = engine.model
    with pytest.raises(UnavailableError):
        await engine.generate(GenerationRequest(prompt=TokenPrompt((1,)), options=GenerateOptions()))
    await engine.stop()
    assert engine.state is EngineState.STOPPED


async def test_stop_while_texts_are_read_is_unavailable_never_a_cancellation(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    text = "word " * 100_000
    waiting = [
        asyncio.create_task(engine.tokenize(text, model="", add_special_tokens=True, parse_special_tokens=True))
        for _ in range(8)
    ]
    await asyncio.sleep(0.01)
    await engine.stop()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, list | UnavailableError) for outcome in outcomes)
    assert any(isinstance(outcome, UnavailableError) for outcome in outcomes)


async def test_a_long_row_is_rebuilt_in_whole_chunks_and_its_progress_never_goes_back(engine, monkeypatch):
    real, widths = packed_method.dispatch_packed_step, []

    def faulty(binding, rows, after):
        widths.append([row.next_unit().tokens for row in rows])
        if len(widths) == 14:
            raise RuntimeError("a passing fault")
        return real(binding, rows, after)

    monkeypatch.setattr(packed_method, "dispatch_packed_step", faulty)
    both = await together(engine, [tokens(seed, 100) for seed in (1, 2)], max_tokens=20, eos_token_ids=())
    assert [len(ids) for _, ids, _, _ in both] == [20, 20]
    rebuilding = [len(units[0]) for units in widths[14:] if len(units) == 1]
    assert max(rebuilding) >= 32
    assert len(rebuilding) <= 2 * (2 + 100 // 32 + 3)


async def together(engine, prompts, **options):
    """What becomes of rows of which none is a step ahead when the last one comes."""
    with held() as let_go:
        running = [asyncio.create_task(run(engine, prompt, **options)) for prompt in prompts]
        await until(lambda: len(engine._thread._batch) + len(engine._thread._incoming) == len(prompts))
        let_go.set()
        return await asyncio.gather(*running)


async def test_stop_during_a_load_ends_the_load(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(UnavailableError):
        await starting
    assert engine.state is EngineState.STOPPED


async def test_others_get_the_interpreter_when_weights_are_read_and_do_not_wait_for_ever(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    await engine.until_reading(0.01)  # nobody loads anything
    starting = asyncio.create_task(engine.start())
    await asyncio.wait_for(engine.until_reading(600.0), 60.0)
    await starting
    await engine.stop()
    failing = Engine(settings(tmp_path / "nothing-here", tmp_path))
    starting = asyncio.create_task(failing.start())
    await asyncio.wait_for(failing.until_reading(600.0), 60.0)
    with pytest.raises((ArtifactError, NotFoundError)):
        await starting
    await failing.stop()


async def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_reason(tmp_path):
    engine = Engine(settings(tmp_path / "nothing-here", tmp_path))
    with pytest.raises((ArtifactError, NotFoundError)):
        await engine.start()
    assert engine.state is EngineState.FAILED
    await engine.stop()


async def test_a_tokenizer_that_cannot_be_used_fails_the_start_with_its_reason(tmp_path):
    tiny_model.write(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    engine = Engine(settings(tmp_path / "model", tmp_path))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        await engine.start()
    assert engine.state is EngineState.FAILED
    await engine.stop()


async def test_a_fault_in_a_step_ends_its_rows_and_the_next_is_answered(engine, monkeypatch):
    real, faults = packed_method.dispatch_packed_step, [RuntimeError("a secret detail")] * 2

    def faulty(binding, rows, after):
        if faults:
            raise faults.pop()
        return real(binding, rows, after)

    monkeypatch.setattr(packed_method, "dispatch_packed_step", faulty)
    _, _, _, end = await run(engine, tokens(1, 4), max_tokens=4, eos_token_ids=())
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, GenerationFailedError)
    assert "secret" not in str(end.error)
    assert (await run(engine, tokens(1, 4), max_tokens=4, eos_token_ids=()))[3].error is None


async def test_a_row_whose_state_was_rebuilt_goes_on_as_if_nothing_had_happened(engine, monkeypatch):
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 30, "eos_token_ids": ()}
    wanted = [(await run(engine, tokens(seed, 30), **options))[1] for seed in (1, 2)]
    real, steps = packed_method.dispatch_packed_step, []

    def faulty(binding, rows, after):
        steps.append(len(rows))
        if len(steps) == 12:
            raise RuntimeError("a passing fault")
        return real(binding, rows, after)

    monkeypatch.setattr(packed_method, "dispatch_packed_step", faulty)
    found = await together(engine, [tokens(seed, 30) for seed in (1, 2)], **options)
    assert steps[11] == 2
    assert [ids for _, ids, _, _ in found] == wanted


async def test_a_dead_device_ends_the_engine_and_is_told_to_who_waits(engine, monkeypatch):
    def dead(binding, rows, after):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(packed_method, "dispatch_packed_step", dead)
    failed = asyncio.create_task(engine.wait_failed())
    monkeypatch.setattr(packed_method.PackedMethod, "works", lambda method: dead(method, [], None))
    assert isinstance((await run(engine, tokens(1, 4), max_tokens=4))[3].error, EngineFailedError)
    await asyncio.wait_for(failed, 60)
    assert engine.state is EngineState.FAILED
    with pytest.raises(EngineFailedError):
        await engine.generate(GenerationRequest(prompt=tokens(1, 2), options=GenerateOptions()))


async def test_every_array_operation_happens_on_the_engine_thread(engine, monkeypatch):
    names, real = set(), packed_method.dispatch_packed_step

    def watched(binding, rows, after):
        names.add(threading.current_thread().name)
        return real(binding, rows, after)

    monkeypatch.setattr(packed_method, "dispatch_packed_step", watched)
    await asyncio.gather(*(run(engine, tokens(seed, 5), max_tokens=3, temperature=1.0) for seed in range(4)))
    assert names == {"mlx-engine"}


async def test_the_models_facts_are_told(engine):
    info = engine.model
    assert (info.name, info.model_type, info.geometry.context_length) == ("tiny", "llama", 128)
    assert info.eos_token_ids == (tiny_model.END_OF_TEXT,)
    assert info.descriptor.id == "legacy:llama"
    assert info.composition.device == "cpu"
    assert info.composition.compute_dtype == "float32"
    assert len(info.fingerprint) == 64
    transposed_head = 4 * tiny_model.VOCAB * info.geometry.hidden_size  # kept where the BLAS is slow at single rows
    assert info.weights_bytes - 4 * info.parameters in (0, transposed_head)
    assert mx.default_device() == mx.cpu


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_step_that_hangs_cannot_keep_callers_waiting_for_the_end(folder, tmp_path, monkeypatch, hurried):
    hanging, release = threading.Event(), threading.Event()

    def hang(binding, rows, after):
        hanging.set()
        release.wait(60)
        raise RuntimeError("the step was let go")

    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    monkeypatch.setattr(packed_method, "dispatch_packed_step", hang)
    monkeypatch.setattr("engine.execution.engine.STOP_SECONDS", 600 if hurried else 0.2)
    generation = await engine.generate(GenerationRequest(prompt=tokens(1, 4), options=GenerateOptions()))
    await asyncio.to_thread(hanging.wait, 60)
    hurry = asyncio.Event()
    if hurried:
        hurry.set()
    await asyncio.wait_for(engine.stop(hurry), 60)
    end = await asyncio.wait_for(generation.finished(), 60)
    assert isinstance(end.error, UnavailableError)
    assert end.stats.prompt_tokens == 4
    release.set()
    await asyncio.to_thread(engine._thread.join)
