"""Engines that store keys and values in other forms: what they tell, what they answer, and what they refuse."""

import asyncio
import itertools
import json
from dataclasses import replace
from unittest import mock

import pytest

from engine.contracts.errors import ConfigurationError
from engine.contracts.events import GenerationFinished, GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.execution.engine import Engine
from engine.execution.stepper import MethodStepper
from tests.engine import tiny_model
from tests.engine.execution.driving import run, settings, tokens


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """Heads of 64 values, as quantized forms need them; every second layer slides."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    tiny_model.write(
        folder,
        head_dim=64,
        max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=24,
    )
    return folder


async def serving(folder, tmp_path, kv_storage):
    engine = Engine(settings(folder, tmp_path, kv_storage=kv_storage))
    await engine.start()
    return engine


OPTIONS = {"max_tokens": 40, "eos_token_ids": ()}
FORMS = {
    "affine8": "kv8",
    "affine8-g32-start40": "kv8-g32-start40",
    "turbo-k8v8": "turbo-k8v8",
    "config": "config",
}
# Prompt and completion lengths of rows that share their steps.
COMPANY = ((60, 2), (20, 60), (10, 60), (5, 60))


async def ids_of(engine, length, limit):
    return (await run(engine, tokens(length, length), max_tokens=limit, eos_token_ids=()))[1]


@pytest.mark.parametrize("kv_storage", FORMS)
async def test_rows_of_any_form_answer_in_company_what_they_answer_alone(wide_folder, tmp_path, kv_storage):
    """Field report 41: with quantized state, rows in company must not answer worse than alone."""
    (wide_folder / "kv_config.json").write_text(json.dumps([{"layer_idx": 0, "bits": 8, "group_size": 32}]))
    engine, plain = [await serving(wide_folder, tmp_path, form) for form in (kv_storage, "plain")]
    try:
        started = (await run(engine, tokens(1, 3), max_tokens=2))[0]
        assert started.execution.kv_storage == FORMS[kv_storage]
        alone = [await ids_of(engine, *lengths) for lengths in COMPANY]
        assert await asyncio.gather(*(ids_of(engine, *lengths) for lengths in COMPANY)) == alone
        exact = [await ids_of(plain, *lengths) for lengths in COMPANY]
        same = sum(map(int.__eq__, itertools.chain(*alone), itertools.chain(*exact)))
        assert same >= 0.6 * sum(limit for _, limit in COMPANY)
    finally:
        await engine.stop()
        await plain.stop()


@pytest.mark.parametrize("kv_storage", ["affine4", "turbo-k8v8", "affine8-g32-start40"])
async def test_a_row_that_is_rebuilt_after_a_failed_step_has_the_bits_that_it_had(wide_folder, tmp_path, kv_storage):
    engine, real, failed = await serving(wide_folder, tmp_path, kv_storage), MethodStepper.dispatch, []
    options = {"max_tokens": 30, "eos_token_ids": (), "logprobs": True}

    def dispatch(stepper, rows, after):
        if rows[0] not in failed and rows[0].next_index > 20:
            failed.append(rows[0])
            raise RuntimeError("a step of this row fails once")
        return real(stepper, rows, after)

    async def answer(length):
        request = GenerationRequest(prompt=tokens(length, length), options=GenerateOptions(**options))
        return await told(await engine.generate(request))

    try:
        wanted = [await answer(length) for length, _ in COMPANY]
        with mock.patch.object(MethodStepper, "dispatch", dispatch):
            found = [await answer(length) for length, _ in COMPANY]
        assert len(failed) == len(COMPANY)
        assert found == wanted
    finally:
        await engine.stop()


async def told(generation):
    """Every token with the logarithm of the probability that it had."""
    tokens_told = []
    while not isinstance(event := await asyncio.wait_for(generation.next_event(), 60), GenerationFinished):
        shown = event.tokens if isinstance(event, TokensGenerated) else ()
        tokens_told += [(one.token, one.logprobs.logprob) for one in shown]
    return tokens_told


async def test_pages_give_what_plain_rows_give_alone_and_beside_rows_with_the_same_beginning(tmp_path):
    folder = tmp_path / "long"
    tiny_model.write(folder, max_position_embeddings=1024)
    paged = Engine(settings(folder, tmp_path, kv_storage="paged", prefix_cache_bytes=None))
    plain = Engine(settings(folder, tmp_path))
    await paged.start()
    await plain.start()
    try:
        beginning = tokens(1, 400)
        prompts = [replace(beginning, ids=(*beginning.ids, *tokens(seed, 9).ids)) for seed in range(2, 8)]
        wanted = [(await run(plain, prompt, **OPTIONS))[1] for prompt in prompts]
        started, first, _, _ = await run(paged, prompts[0], **OPTIONS)
        assert (started.execution.paged_kv, started.execution.kv_storage) == (True, "bf16-b256")
        others = await asyncio.gather(*(run(paged, prompt, **OPTIONS) for prompt in prompts[1:]))
        assert [first, *(ids for _, ids, _, _ in others)] == wanted
        assert [end.stats.cached_tokens for _, _, _, end in others] == [400] * 5
    finally:
        await paged.stop()
        await plain.stop()


@pytest.mark.parametrize(
    ("kv_storage", "why"),
    [("affine4", "heads of 16 values"), ("turbo-k4v4", "heads have 16 values"), ("config", "no"), ("q", "known")],
)
async def test_a_form_that_the_model_cannot_take_is_refused_at_the_start(folder, tmp_path, kv_storage, why):
    engine = Engine(settings(folder, tmp_path, kv_storage=kv_storage))
    try:
        with pytest.raises(ConfigurationError, match=f"kv_storage: .*{why}"):
            await engine.start()
    finally:
        await engine.stop()
