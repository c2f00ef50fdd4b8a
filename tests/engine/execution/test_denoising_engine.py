"""A block-diffusion model behind the front door: what is told, what is refused, and the tokens of mlx-vlm."""

import asyncio

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    ConfigurationError,
    GenerationAborted,
    InsufficientMemoryError,
    NotFoundError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from engine.contracts.events import CanvasRevised, GenerationFinished, GenerationRequest, TokensGenerated
from engine.contracts.memory import MemoryLoad
from engine.contracts.option_groups import AdapterSelection, DenoisingOptions
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TextPrompt, TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution.engine import Engine
from engine.execution.estimating import unloaded_facts
from engine.execution.state_room import estimate
from tests.engine import tiny_denoiser
from tests.engine.adapters import tiny_adapters
from tests.engine.execution.driving import collect, run, settings
from tests.engine.generation import denoising_oracle
from tests.engine.models import tiny_diffusion

ENDS = {1, 106}
LONG = 0
"""A seed whose answer takes several blocks."""
FEW = DenoisingOptions(max_denoising_steps=5, min_canvas_length=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder, and mlx-vlm's model of it."""
    folder = tmp_path_factory.mktemp("denoiser") / "tiny"
    return folder, tiny_denoiser.write(folder)


@pytest.fixture(scope="module")
def denoiser_folder(tiny):
    return tiny[0]


@pytest.fixture
async def denoiser(denoiser_folder, tmp_path):
    engine = Engine(settings(denoiser_folder, tmp_path))
    await engine.start()
    yield engine
    await engine.stop()


def prompt(seed, length=9):
    return TokenPrompt(tuple(tiny_diffusion.ids(seed, length)))


def oracle(tiny, seed, max_tokens):
    return denoising_oracle.generate(
        tiny[1], list(prompt(seed).ids), seed=seed, ends=ENDS, max_tokens=max_tokens,
        max_denoising_steps=5, diffusion_min_canvas_length=4,
    )  # fmt: skip


async def test_the_front_door_says_what_mlx_vlm_says(tiny, denoiser):
    for seed in range(6):
        _, ids, _, end = await run(denoiser, prompt(seed), seed=seed, max_tokens=40, denoising=FEW)
        wanted = oracle(tiny, seed, 40)
        assert (tuple(ids), end.finish_reason.value) == (wanted.tokens, wanted.reason)
        done = end.stats.denoising
        assert (done.steps, done.canvas_tokens, done.blocks) == (wanted.passes, wanted.canvas_tokens, wanted.blocks)


async def test_started_tells_the_method_and_options_that_can_be_sent_again(denoiser):
    started, ids, text, _ = await run(denoiser, prompt(1), max_tokens=20, denoising=FEW)
    assert started.execution.method == "denoising"
    assert started.descriptor.id == "legacy-diffusion-gemma"
    assert started.descriptor.graph_abi == "mlx-denoising-v1"
    again = started.options
    assert (again.temperature, again.eos_token_ids) == (0.0, (1, 106))
    plan = again.denoising
    assert (plan.max_denoising_steps, plan.min_canvas_length, plan.threshold) == (5, 4, 0.9)
    repeated = await run(denoiser, prompt(1), max_tokens=20, seed=again.seed, denoising=FEW)
    assert (repeated[1], repeated[2]) == (ids, text)


async def test_rows_that_share_the_engine_say_what_they_say_alone(denoiser):
    wanted = [await run(denoiser, prompt(seed), seed=seed, max_tokens=30, denoising=FEW) for seed in range(4)]
    together = await asyncio.gather(
        *(run(denoiser, prompt(seed), seed=seed, max_tokens=30, denoising=FEW) for seed in range(4))
    )
    assert [(one[1], one[2]) for one in together] == [(one[1], one[2]) for one in wanted]


async def test_rows_with_an_adapter_and_without_share_the_engine(tmp_path):
    folder = tmp_path / "tiny"
    model = tiny_denoiser.write(folder)
    plain = [oracle((folder, model), seed, 30).tokens for seed in range(3)]
    adapter = tiny_adapters.write_mlx(tmp_path / "adapter", tiny_adapters.adapt(model))
    adapted = [oracle((folder, model), seed, 30).tokens for seed in range(3)]
    engine = Engine(settings(folder, tmp_path, adapters=(("a", adapter),)))
    await engine.start()
    try:
        wanted = [(), (AdapterSelection(id="a"),)]
        runs = await asyncio.gather(
            *(
                run(engine, prompt(seed), seed=seed, max_tokens=30, denoising=FEW, adapters=adapters)
                for adapters in wanted
                for seed in range(3)
            )
        )
        assert [tuple(one[1]) for one in runs] == [*plain, *adapted]
        assert set(plain).isdisjoint(adapted)
        with pytest.raises(NotFoundError, match="no adapter named 'b'"):
            await run(engine, prompt(1), adapters=(AdapterSelection(id="b"),))
    finally:
        await engine.stop()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7])
async def test_a_prompt_may_be_read_in_chunks(tiny, denoiser, chunk_tokens):
    _, ids, _, _ = await run(
        denoiser, prompt(LONG), seed=LONG, max_tokens=40, denoising=FEW, prefill_chunk_size=chunk_tokens
    )
    assert tuple(ids) == oracle(tiny, LONG, 40).tokens


async def test_canvases_come_before_the_tokens_that_they_become(denoiser):
    request = GenerationRequest(
        prompt=prompt(LONG), options=GenerateOptions(seed=LONG, max_tokens=40, denoising=FEW), draft_blocks=True
    )
    generation = await denoiser.generate(request)
    canvases, tokens, event = {}, [], None
    async with asyncio.timeout(60):
        while not isinstance(event, GenerationFinished):
            event = await generation.next_event()
            if isinstance(event, CanvasRevised):
                canvases[event.block_index] = event
            elif isinstance(event, TokensGenerated):
                tokens += [token.token for token in event.tokens]
    committed = [token for index in sorted(canvases) for token in canvases[index].tokens]
    assert tokens == committed[: len(tokens)]
    assert len(tokens) > 16, "the case must hold more than one block"


async def test_an_abort_ends_a_generation_between_two_passes(denoiser):
    endless = DenoisingOptions(max_denoising_steps=10**6, threshold=1.0, sampler="entropy-bound")
    generation = await denoiser.generate(
        GenerationRequest(prompt=prompt(1), options=GenerateOptions(denoising=endless), draft_blocks=True)
    )
    while not isinstance(await generation.next_event(), CanvasRevised):
        pass
    generation.abort(AbortReason.REQUESTED)
    async with asyncio.timeout(60):
        end = await generation.finished()
    assert isinstance(end.error, GenerationAborted)
    assert end.stats.generated_tokens == 0
    assert end.stats.denoising.steps > 0
    assert (await run(denoiser, prompt(1), max_tokens=3, denoising=FEW))[3].error is None


async def test_text_prompts_and_stop_sequences_work_as_elsewhere(denoiser):
    _, _, text, end = await run(denoiser, TextPrompt("Hello"), seed=4, max_tokens=40, denoising=FEW)
    stop = text[5:7]
    _, _, cut, stopped = await run(
        denoiser, TextPrompt("Hello"), seed=4, max_tokens=40, denoising=FEW, stop_sequences=(stop,)
    )
    assert cut == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.matched_stop) == (FinishReason.STOP, stop)
    assert end.matched_stop == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.7}, "options.temperature"),
        ({"logprobs": True}, "options.logprobs"),
        ({"logit_bias": ((1, 2.0),)}, "options.logit_bias"),
    ],
)
async def test_what_the_method_cannot_honour_is_refused_by_name(denoiser, options, named):
    with pytest.raises(UnsupportedOptionError) as caught:
        await run(denoiser, prompt(1), **options)
    assert caught.value.option == named


async def test_an_autoregressive_model_refuses_what_only_this_method_knows(engine):
    with pytest.raises(UnsupportedOptionError, match=r"options\.denoising"):
        await run(engine, prompt(1), denoising=FEW)
    request = GenerationRequest(prompt=prompt(1), options=GenerateOptions(), draft_blocks=True)
    with pytest.raises(UnsupportedOptionError, match=r"delivery\.draft_blocks"):
        await engine.generate(request)


async def test_a_prompt_that_leaves_no_room_is_refused(denoiser):
    context = denoiser.model.geometry.context_length
    with pytest.raises(PromptTooLongError):
        await run(denoiser, TokenPrompt((5,) * context))
    _, ids, _, end = await run(denoiser, TokenPrompt((5,) * (context - 2)), seed=1, denoising=FEW)
    assert len(ids) <= 2
    assert end.error is None


async def test_the_model_s_facts_tell_the_method(denoiser):
    assert denoiser.model.declaration.method == "denoising"
    assert denoiser.model.geometry.canvas_length == tiny_diffusion.CANVAS


async def test_admission_and_estimate_go_by_one_prediction(denoiser_folder, tmp_path):
    asked = settings(denoiser_folder, tmp_path, state_bytes=10**6)
    engine = Engine(asked)
    await engine.start()
    try:
        load = MemoryLoad(prompt_tokens=20, max_tokens=30, rows=3)
        found = engine.estimate_memory(load, model="")
        unloaded = estimate(unloaded_facts(asked), load)
        assert found == unloaded
        most = found.max_context_tokens
        assert engine.estimate_memory(MemoryLoad(prompt_tokens=most - 1, max_tokens=1), model="").fits
        if most < engine.model.geometry.context_length - 8:
            with pytest.raises(InsufficientMemoryError):
                await run(engine, TokenPrompt((5,) * most), max_tokens=8)
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefix_cache_bytes": 1000}, "prefix_cache_bytes"),
        ({"prefix_cache_dir": "kept"}, "prefix_cache_dir"),
        ({"kv_storage": "affine8"}, "kv_storage"),
        ({"kv_storage": "paged"}, "kv_storage"),
    ],
)
async def test_settings_that_the_method_cannot_honour_end_the_load_by_name(denoiser_folder, tmp_path, changes, named):
    if "prefix_cache_dir" in changes:
        changes = {"prefix_cache_dir": tmp_path / "kept"}
    engine = Engine(settings(denoiser_folder, tmp_path, **changes))
    with pytest.raises(ConfigurationError, match=named):
        await engine.start()
    await engine.stop()


async def test_a_slow_reader_loses_no_token(denoiser):
    request = GenerationRequest(
        prompt=prompt(3), options=GenerateOptions(seed=3, max_tokens=40, denoising=FEW), draft_blocks=True
    )
    generation = await denoiser.generate(request)
    await generation.finished()
    _, ids, _, _ = await collect(generation)
    assert ids == (await run(denoiser, prompt(3), seed=3, max_tokens=40, denoising=FEW))[1]
