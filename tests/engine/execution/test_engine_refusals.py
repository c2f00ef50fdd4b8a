"""What an engine refuses, with which numbers, and that a refusal costs nothing."""

import asyncio

import mlx.core as mx
import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    ChatTemplateError,
    ConfigurationError,
    CorruptArtifactError,
    DuplicateRequestError,
    InsufficientMemoryError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from engine.contracts.events import GenerationRequest
from engine.contracts.memory import MemoryLoad
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import ChatMessage, ChatPrompt, ImagePart, TextPart, TextPrompt, TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution import side_work
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.execution.driving import collect, run, settings, tokens


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (TokenPrompt(()), {}, InvalidRequestError),
        (TextPrompt(""), {}, InvalidRequestError),
        (ChatPrompt(messages=()), {}, InvalidRequestError),
        (TokenPrompt((1, tiny_model.VOCAB)), {}, InvalidRequestError),
        (TokenPrompt((1,) * 128), {}, PromptTooLongError),
        (TokenPrompt((1,)), {"eos_token_ids": (tiny_model.VOCAB,)}, InvalidRequestError),
        (TokenPrompt((1,)), {"fill": "echo"}, UnsupportedOptionError),
        (ChatPrompt(messages=(ChatMessage("user", (ImagePart(b"png"),)),)), {}, UnsupportedOptionError),
    ],
)
async def test_refusals_cost_nothing_and_the_next_request_is_answered(engine, prompt, options, error):
    with pytest.raises(error):
        await run(engine, prompt, **options)
    assert (await run(engine, tokens(1, 4), max_tokens=2, eos_token_ids=()))[3].finish_reason is FinishReason.LENGTH


async def test_empty_prompts_are_refused_beside_running_ones(engine):
    running = asyncio.create_task(run(engine, tokens(1, 100), max_tokens=20, eos_token_ids=()))
    refused = await asyncio.gather(*(run(engine, TextPrompt("")) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, InvalidRequestError) for error in refused)
    assert len((await running)[1]) == 20


async def test_an_unknown_model_is_not_found_and_the_empty_name_is_the_served_one(engine):
    for name in ("other", "TINY", "../tiny", " tiny"):
        with pytest.raises(NotFoundError, match="no model named"):
            await engine.generate(GenerationRequest(prompt=TokenPrompt((1,)), options=GenerateOptions(), model=name))
    generation = await engine.generate(
        GenerationRequest(prompt=TokenPrompt((1,)), options=GenerateOptions(max_tokens=1), model="tiny")
    )
    assert (await collect(generation))[0].model == "tiny"


async def test_a_live_request_id_is_refused_and_free_again_after_the_end(engine):
    options = GenerateOptions(max_tokens=100, eos_token_ids=())
    request = GenerationRequest(prompt=TokenPrompt((1, 2)), options=options, request_id="mine", caller="a")
    first = await engine.generate(request)
    with pytest.raises(DuplicateRequestError, match="mine"):
        await engine.generate(request)
    other = await engine.generate(
        GenerationRequest(prompt=TokenPrompt((1, 2)), options=options, request_id="mine", caller="b")
    )
    assert engine.abort(caller="c", request_id="mine") is None
    assert engine.abort(caller="a", request_id="mine") is first
    assert (await collect(first))[3].finish_reason is FinishReason.CANCELLED
    assert engine.abort(caller="a", request_id="mine") is None
    assert engine.abort(caller="b", generation_id=other.generation_id) is other
    await collect(await engine.generate(request))


async def test_the_queue_refuses_with_numbers_when_it_is_full(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path, max_rows=1, max_queue=2))
    await engine.start()
    generations, refused = [], None
    for _ in range(8):
        try:
            generations.append(
                await engine.generate(
                    GenerationRequest(prompt=tokens(1, 20), options=GenerateOptions(eos_token_ids=()))
                )
            )
        except OverloadedError as error:
            refused = error
            break
    assert refused is not None
    assert (refused.limit, refused.used) == (2, 2)
    for generation in generations:
        generation.abort(AbortReason.REQUESTED)
    await engine.stop()


async def test_a_prompt_that_is_far_too_long_is_refused_before_all_of_it_is_read(engine, monkeypatch):
    read, tokenizer = [], engine._resident.text.tokenizer
    real = type(tokenizer).encode

    def watched(self, text, **options):
        read.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", watched)
    for prompt in (
        TextPrompt("x" * 5_000_000),
        ChatPrompt(messages=tuple(ChatMessage("user", (TextPart("y" * 1000),)) for _ in range(3000))),
    ):
        with pytest.raises(PromptTooLongError):
            await run(engine, prompt)
    assert sum(read) < 200_000


async def test_texts_and_ids_beyond_their_limits_are_refused_with_numbers(engine):
    with pytest.raises(InvalidRequestError, match="1048576 characters are allowed, got 1048577"):
        await engine.tokenize("x" * 1_048_577, model="", add_special_tokens=True, parse_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="1048576 are allowed, got 1048577"):
        await engine.detokenize([1] * 1_048_577, model="", skip_special_tokens=True)


async def test_the_queue_of_texts_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(side_work, "MAX_JOBS", 3)
    outcomes = await asyncio.gather(
        *(
            engine.tokenize("a b" * 1000, model="", add_special_tokens=True, parse_special_tokens=True)
            for _ in range(6)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, OverloadedError) for outcome in outcomes) == 3
    assert (await engine.tokenize("a", model="", add_special_tokens=True, parse_special_tokens=True)) == outcomes[0][:1]


async def test_weights_that_are_not_numbers_are_refused_at_the_start(tmp_path):
    tiny_model.write(tmp_path / "bad")
    weights = mx.load(str(tmp_path / "bad" / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.nan
    mx.save_safetensors(str(tmp_path / "bad" / "model.safetensors"), weights)
    engine = Engine(settings(tmp_path / "bad", tmp_path))
    with pytest.raises(CorruptArtifactError, match=r"bad: .* not finite"):
        await engine.start()
    await engine.stop()


async def test_a_request_whose_state_could_never_fit_is_refused_with_numbers(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path, state_bytes=2 * 2 * 2 * 16 * 4 * 256 - 1))
    await engine.start()
    with pytest.raises(InsufficientMemoryError) as caught:
        await run(engine, tokens(1, 4), max_tokens=2)
    assert caught.value.needed_bytes == caught.value.budget_bytes + 1
    await engine.stop()


def with_free_memory(monkeypatch, nbytes):
    monkeypatch.setattr("engine.runtime.host.Host.available_memory_bytes", lambda _host: nbytes)


async def test_a_long_stated_context_leaves_the_memory_to_rows_as_long_as_they_are(tmp_path, monkeypatch):
    with_free_memory(monkeypatch, 10**8)
    tiny_model.write(tmp_path / "long", max_position_embeddings=10**7)
    engine = Engine(settings(tmp_path / "long", tmp_path))
    await engine.start()
    assert (await run(engine, tokens(1, 300), max_tokens=3, eos_token_ids=()))[3].stats.generated_tokens == 3
    with pytest.raises(InsufficientMemoryError) as caught:
        await run(engine, tokens(1, 4), max_tokens=10**6)
    assert caught.value.needed_bytes > caught.value.budget_bytes == 75_000_000
    longest = engine.estimate_memory(MemoryLoad(prompt_tokens=1, max_tokens=1), model="").max_context_tokens
    assert engine.estimate_memory(MemoryLoad(prompt_tokens=longest, max_tokens=0), model="").fits
    await engine.stop()


async def test_a_model_beside_whose_weights_no_request_fits_is_not_served(folder, tmp_path, monkeypatch):
    with_free_memory(monkeypatch, 10**5)
    engine = Engine(settings(folder, tmp_path))
    with pytest.raises(ConfigurationError, match=r"weights of .* 75000 bytes"):
        await engine.start()
    await engine.stop()


async def test_rows_wait_while_the_state_of_others_fills_the_memory(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path, state_bytes=2 * 2 * 2 * 16 * 4 * 256))
    await engine.start()
    ends = await asyncio.gather(*(run(engine, tokens(seed, 9), max_tokens=5, eos_token_ids=()) for seed in range(4)))
    assert all(end.finish_reason is FinishReason.LENGTH for _, _, _, end in ends)
    assert sum(end.stats.queue_ms > end.stats.prefill_ms for _, _, _, end in ends) >= 2
    await engine.stop()


async def test_a_model_without_a_template_refuses_chats_and_answers_text(tmp_path):
    tiny_model.write(tmp_path / "plain", chat_template=None)
    engine = Engine(settings(tmp_path / "plain", tmp_path))
    info = await engine.start()
    assert not info.has_chat_template
    with pytest.raises(ChatTemplateError, match="chat template"):
        await run(engine, ChatPrompt(messages=(ChatMessage("user", (TextPart("hi"),)),)))
    assert (await run(engine, TextPrompt("hi"), max_tokens=1))[3].error is None
    await engine.stop()
