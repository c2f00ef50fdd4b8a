"""Conversations with images behind the front door: mlx-vlm's tokens, what is refused before any work, and memory."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from engine.artifacts.image_prompt import ImagePlace
from engine.contracts.errors import (
    ChatTemplateError,
    InsufficientMemoryError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from engine.contracts.memory import MemoryLoad
from engine.contracts.option_groups import DenoisingOptions
from engine.contracts.prompt import ChatMessage, ChatPrompt, ImagePart, TextPart, TokenPrompt
from engine.contracts.vision import PromptImage
from engine.execution.engine import Engine
from engine.execution.estimating import unloaded_facts
from engine.execution.state_room import estimate
from tests.engine import tiny_denoiser, tiny_seer
from tests.engine.execution.driving import run, settings
from tests.engine.generation import denoising_oracle
from tests.engine.models import tiny_diffusion, tiny_vision

ENDS = {1, 106}
FEW = DenoisingOptions(max_denoising_steps=5, min_canvas_length=4)
PICTURES = {seed: tiny_vision.picture(seed) for seed in range(4)}
PIXELS = np.zeros((16, 24, 3), dtype=np.uint8)
LARGE = tiny_vision.picture(9, 300, 200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder, and mlx-vlm's model of it."""
    folder = tmp_path_factory.mktemp("seer") / "tiny"
    return folder, tiny_seer.write(folder)


@pytest.fixture
async def seer(tiny, tmp_path):
    engine = Engine(settings(tiny[0], tmp_path))
    await engine.start()
    yield engine
    await engine.stop()


def chat(*parts):
    """A turn of texts and images."""
    content = [TextPart(part) if isinstance(part, str) else ImagePart(tiny_vision.encoded(part)) for part in parts]
    return ChatPrompt(messages=(ChatMessage("user", tuple(content)),))


def sent(*data):
    """A turn of images as they are sent."""
    return ChatPrompt(messages=(ChatMessage("user", (TextPart("Look:"), *map(ImagePart, data))),))


async def oracle(tiny, engine, prompt, images, *, seed, max_tokens=40):
    """What mlx-vlm says to the same ids and pixels."""
    _, ids = await engine.render_chat(prompt, model="")
    pixels, tokens = tiny_vision.pixels_of(tiny[1], images)
    assert ids.count(tiny_seer.IMAGE) == sum(tokens)
    return denoising_oracle.generate(
        tiny[1], ids, seed=seed, ends=ENDS, max_tokens=max_tokens, pixels=pixels or None,
        max_denoising_steps=5, diffusion_min_canvas_length=4,
    )  # fmt: skip


async def answer(engine, prompt, **options):
    """The ids of an answer that ends without an error. There may be none: the model may end at once."""
    _, ids, _, end = await run(engine, prompt, **({"max_tokens": 40, "denoising": FEW} | options))
    assert end.error is None
    return tuple(ids)


CONVERSATIONS = {
    "one image": ["What is this?", PICTURES[0]],
    "an image first": [PICTURES[1], "And this?"],
    "an image alone": [PICTURES[2]],
    "two, of two sizes": ["One:", PICTURES[0], " two:", LARGE, "."],
    "two side by side": [PICTURES[0], PICTURES[1]],
    "none": ["Just a word."],
}


@pytest.mark.parametrize("parts", CONVERSATIONS.values(), ids=CONVERSATIONS)
async def test_the_front_door_says_what_mlx_vlm_says(tiny, seer, parts):
    images = [part for part in parts if not isinstance(part, str)]
    for seed in (0, 5):
        wanted = await oracle(tiny, seer, chat(*parts), images, seed=seed)
        assert await answer(seer, chat(*parts), seed=seed) == wanted.tokens


async def test_images_of_the_same_ids_never_answer_for_each_other(tiny, seer):
    """Two prompts that differ in pixels alone, alone and together."""
    prompts = [chat("What is it?", PICTURES[seed]) for seed in range(3)]
    rendered = [await seer.render_chat(prompt, model="") for prompt in prompts]
    assert rendered[0] == rendered[1] == rendered[2]
    wanted = [(await oracle(tiny, seer, prompt, [PICTURES[at]], seed=5)).tokens for at, prompt in enumerate(prompts)]
    assert len(set(wanted)) == 3
    assert [await answer(seer, prompt, seed=5) for prompt in prompts] == wanted
    together = await asyncio.gather(*(answer(seer, prompt, seed=5) for prompt in (*prompts, *prompts)))
    assert together == [*wanted, *wanted]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30])
async def test_a_prompt_may_be_read_in_chunks_that_cut_no_image(seer, chunk_tokens):
    prompt = chat("One:", PICTURES[0], " two:", LARGE, ".")
    assert await answer(seer, prompt, seed=3, prefill_chunk_size=chunk_tokens) == await answer(seer, prompt, seed=3)


async def test_the_tokens_of_images_are_counted(seer):
    started, _, _, end = await run(seer, chat("a", PICTURES[0]), max_tokens=4, denoising=FEW)
    blind = await run(seer, chat("a"), max_tokens=4, denoising=FEW)
    assert end.stats.prompt_tokens - blind[3].stats.prompt_tokens == 6 + 2
    assert started.prompt_tokens == end.stats.prompt_tokens


async def test_a_token_that_a_user_writes_is_no_image(seer):
    """It stays text, so that nobody's words take an image's place."""
    _, ids = await seer.render_chat(chat("<|image|><|image>", PICTURES[0]), model="")
    assert ids.count(tiny_seer.IMAGE) == 6
    assert (await seer.render_chat(chat("<|image|>"), model=""))[1].count(tiny_seer.IMAGE) == 0


REFUSED = {
    "no image": (sent(b"GIF89a"), "content[1].image: is no PNG, JPEG or WebP image"),
    "empty": (sent(b""), "content[1].image: is empty"),
    "damaged": (
        sent(tiny_vision.encoded(PICTURES[0]), tiny_vision.encoded(PICTURES[1])[:-40]),
        "content[2].image: is damaged",
    ),
    "too many": (sent(*[b"x"] * 17), "prompt.chat.messages: at most 16 images"),
}


@pytest.mark.parametrize(("prompt", "told"), REFUSED.values(), ids=REFUSED)
async def test_an_image_that_cannot_be_used_costs_nothing(seer, prompt, told):
    with pytest.raises(InvalidRequestError) as caught:
        await run(seer, prompt, denoising=FEW)
    assert told in str(caught.value)
    assert seer.live_generations() == []
    await answer(seer, chat("still", PICTURES[0]), max_tokens=4)


async def test_images_that_leave_no_room_for_an_answer_are_refused_by_their_number(tiny, tmp_path):
    folder = tmp_path / "short"
    tiny_seer.write(folder, max_position_embeddings=64)
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    try:
        with pytest.raises(PromptTooLongError, match="leave no room"):
            await run(engine, chat(*[PICTURES[0]] * 6), denoising=FEW)
        await answer(engine, chat(PICTURES[0]), max_tokens=2)
    finally:
        await engine.stop()


async def test_a_template_that_makes_no_room_for_an_image_is_named(tmp_path):
    folder = tmp_path / "blind"
    tiny_seer.write(folder, chat_template=tiny_seer.BLIND_TEMPLATE)
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    try:
        with pytest.raises(ChatTemplateError, match="makes room for 0 of 1 images"):
            await run(engine, chat("Look:", PICTURES[0]), denoising=FEW)
    finally:
        await engine.stop()


async def test_a_model_without_a_tower_refuses_images_by_name(tmp_path):
    folder = tmp_path / "blind"
    tiny_denoiser.write(folder)
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    try:
        assert engine.model.declaration.media is None
        with pytest.raises(UnsupportedOptionError, match=r"content\[1\].image is not supported: the served"):
            await run(engine, chat("Look:", PICTURES[0]), denoising=FEW)
        with pytest.raises(UnsupportedOptionError, match="images is not supported"):
            engine.estimate_memory(MemoryLoad(prompt_tokens=20, max_tokens=4, images=1), model="")
    finally:
        await engine.stop()


async def test_a_prompt_of_ids_reads_padding_where_an_image_would_stand(tiny, seer):
    ids = [*tiny_diffusion.ids(1, 5), tiny_seer.BEGIN, *[tiny_seer.IMAGE] * 6, tiny_seer.END]
    wanted = denoising_oracle.generate(
        tiny[1], ids, seed=2, ends=ENDS, max_tokens=20, max_denoising_steps=5, diffusion_min_canvas_length=4
    )
    assert await answer(seer, TokenPrompt(tuple(ids)), seed=2, max_tokens=20) == wanted.tokens


async def test_admission_counts_what_reading_an_image_takes(tiny, tmp_path):
    asked = settings(tiny[0], tmp_path)
    facts = unloaded_facts(asked)
    loads = [MemoryLoad(prompt_tokens=60, max_tokens=8, rows=2, images=count) for count in range(3)]
    unloaded = [estimate(facts, load) for load in loads]
    taken = [found.kv_bytes for found in unloaded]
    pixels = 2 * 6 * 8 * 8 * 3
    assert taken[0] < taken[1]
    assert taken[2] - taken[1] == pixels
    engine = Engine(settings(tiny[0], tmp_path, state_bytes=taken[1] // 2 - 1))
    await engine.start()
    try:
        assert [engine.estimate_memory(load, model="").kv_bytes for load in loads] == taken
        assert engine.model.weights_bytes == unloaded[0].weights_bytes
        with pytest.raises(InsufficientMemoryError, match=r"of them for the prompt's images.*ask for fewer images"):
            await run(engine, chat("a" * 34, PICTURES[0]), max_tokens=8, denoising=FEW)
        await answer(engine, chat("a" * 34), max_tokens=8)
    finally:
        await engine.stop()


async def test_the_longest_context_of_an_estimate_leaves_room_for_its_images(tiny, tmp_path):
    asked = settings(tiny[0], tmp_path)
    taken = estimate(unloaded_facts(asked), MemoryLoad(prompt_tokens=60, max_tokens=8, images=1)).kv_bytes
    facts = replace(unloaded_facts(asked), state_bytes=taken, holds_workspace=False)
    longest = [
        estimate(facts, MemoryLoad(prompt_tokens=60, max_tokens=8, images=images)).max_context_tokens
        for images in range(2)
    ]
    assert longest[0] > longest[1] >= 60
    assert estimate(facts, MemoryLoad(prompt_tokens=longest[1], max_tokens=0, images=1)).fits
    small = replace(facts, state_bytes=1000)
    assert estimate(small, MemoryLoad(prompt_tokens=60, max_tokens=8, images=1)).max_context_tokens == 0


async def test_images_alone_that_do_not_fit_are_told_to_be_left_out(tiny, tmp_path):
    asked = settings(tiny[0], tmp_path)
    facts = unloaded_facts(asked)
    taken = [estimate(facts, MemoryLoad(prompt_tokens=60, max_tokens=8, images=count)).kv_bytes for count in range(2)]
    images_bytes = taken[1] - taken[0]
    engine = Engine(settings(tiny[0], tmp_path, state_bytes=images_bytes))
    await engine.start()
    try:
        with pytest.raises(InsufficientMemoryError, match="leave images out") as caught:
            await run(engine, chat("a", PICTURES[0]), max_tokens=8, denoising=FEW)
        assert caught.value.images_bytes == images_bytes
    finally:
        await engine.stop()


async def test_text_never_waits_for_pixels_and_who_leaves_is_not_decoded(seer, monkeypatch):
    """Both threads for images are held up; a third caller's image waits, and is dropped with its caller."""
    held, begins, begun = threading.Event(), threading.Semaphore(0), []

    def slow(place):
        begun.append(place)
        begins.release()
        held.wait(60)
        return PromptImage(start=place.start, tokens=place.tokens, pixels=PIXELS)

    monkeypatch.setattr(ImagePlace, "decoded", slow)

    def look():
        return asyncio.create_task(answer(seer, chat("a", PICTURES[0]), max_tokens=4, seed=5))

    looking = [look(), look()]
    try:
        for _ in looking:
            await asyncio.to_thread(begins.acquire)
        late = look()
        while seer._image_work._jobs < 3:  # noqa: ASYNC110 - nobody tells that a job waits
            await asyncio.sleep(0.001)
        await answer(seer, chat("Just a word."), max_tokens=4)
        late.cancel()
        await asyncio.wait([late])
    finally:
        held.set()
    assert await looking[0] == await looking[1]
    assert len(begun) == 2
