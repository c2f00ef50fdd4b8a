"""What runs for a request to a block-diffusion model: forced values, the caller's choices, refusals by name."""

import dataclasses

import pytest

from engine.contracts.denoising import DenoisingPlan
from engine.contracts.errors import InvalidRequestError, NotFoundError, UnsupportedOptionError
from engine.contracts.hlg import HlgOetf
from engine.contracts.option_groups import AdapterSelection, CacheOptions, DenoisingOptions
from engine.contracts.options import GenerateOptions, OptionDefaults
from engine.generation.bindings.prefill_policy import FixedChunk
from engine.generation.denoising_planning import FRESH_SEEDS, refuse_for_denoising, resolve_denoising_options
from engine.generation.planning import resolve_execution
from tests.engine.generation.scripted_denoiser import CANVAS, DECLARATION, GEOMETRY
from tests.engine.generation.test_planning import VALUES, adapter, model

REFUSED = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "xtc_probability": 0.5,
    "hlg": HlgOetf(),
    "curve": ((1.0, 1.0), (50.0, 50.0)),
    "logit_bias": ((1, 2.0),),
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logprobs": True,
    "top_logprobs": 3,
    "cache_session_id": "s",
}
HONOURED = {
    "max_tokens": 3,
    "stop_sequences": ("x",),
    "prefill_chunk_size": 7,
    "seed": 9,
    "adapters": (AdapterSelection(id="a"),),
    "denoising": DenoisingOptions(max_denoising_steps=3),
}
UNIONED = {"eos_token_ids": (5,)}
"""Joins what ends a completion anyway."""
WITHOUT_EFFECT_ALONE = {
    "min_tokens_to_keep": 2,
    "xtc_threshold": 0.3,
    "xtc_special_tokens": (1,),
    "repetition_context_size": 5,
    "presence_context_size": 5,
    "frequency_context_size": 5,
}
"""Shape what is refused, and nothing else."""
ASKS_FOR_NOTHING = {"cache": CacheOptions(bypass=True, salt="s")}
"""Keeps a prompt from being shared, and none is."""


OF_DURABLE_ONES = ("checkpoint_every_tokens",)
"""Refused with durable delivery, which this method does not have, and without it for all models."""


def denoiser(**changes):
    values = {"declaration": DECLARATION, "geometry": GEOMETRY, "eos_token_ids": (1,)} | changes
    return dataclasses.replace(model(), **values)


def resolve(options, *, prompt_tokens=4, fresh_seed=77, **changes):
    return resolve_denoising_options(
        options, denoiser(**changes), FixedChunk(32), prompt_tokens=prompt_tokens, fresh_seed=fresh_seed
    )


def test_every_option_is_either_honoured_or_refused_or_has_no_effect_of_its_own():
    known = {*REFUSED, *HONOURED, *UNIONED, *WITHOUT_EFFECT_ALONE, *ASKS_FOR_NOTHING, *VALUES, *OF_DURABLE_ONES}
    assert known == {field.name for field in dataclasses.fields(GenerateOptions)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_method_cannot_honour_is_refused_by_name(name):
    with pytest.raises(UnsupportedOptionError, match=f"^options.{name} is not supported: a block-diffusion"):
        refuse_for_denoising(GenerateOptions(**{name: REFUSED[name]}))


def test_values_that_ask_for_nothing_are_accepted():
    refuse_for_denoising(
        GenerateOptions(
            temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, xtc_probability=0.0, repetition_penalty=1.0,
            presence_penalty=0.0, frequency_penalty=0.0, logprobs=False, top_logprobs=0, cache_session_id="",
            **WITHOUT_EFFECT_ALONE, **ASKS_FOR_NOTHING, **HONOURED, **UNIONED,
        )
    )  # fmt: skip


def test_what_is_served_is_forced_unless_the_caller_says_otherwise():
    resolved = resolve(GenerateOptions(), option_defaults=OptionDefaults(max_tokens=9, temperature=0.7, top_k=40))
    assert resolved.max_tokens == GEOMETRY.context_length - 4 < 256
    assert resolve(GenerateOptions(), prompt_tokens=0).max_tokens == 256
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.0, 0, 0.0, 0.0)
    assert resolved.eos_token_ids == (1,)
    assert resolved.denoising == DenoisingPlan(max_canvas_length=CANVAS, min_canvas_length=CANVAS)


def test_every_honoured_option_changes_what_runs():
    plain = resolve(GenerateOptions(), adapters=(adapter("a"),))
    for name, value in HONOURED.items():
        changed = resolve(GenerateOptions(**{name: value}), adapters=(adapter("a"),))
        assert changed != plain, name
        if name != "denoising":
            assert getattr(changed, name) == value
    chosen = resolve(GenerateOptions(denoising=HONOURED["denoising"])).denoising
    assert chosen is not None
    assert chosen.max_denoising_steps == 3


def test_the_caller_s_ends_join_those_of_the_method():
    assert resolve(GenerateOptions(eos_token_ids=(5, 1, 5))).eos_token_ids == (1, 5)
    assert resolve(GenerateOptions(eos_token_ids=())).eos_token_ids == (1,)


def test_the_seed_is_the_caller_s_or_a_fresh_one():
    assert resolve(GenerateOptions(seed=2**64 - 1)).seed == 2**64 - 1
    fresh = resolve(GenerateOptions(), fresh_seed=2**32 - 1)
    assert fresh.seed < FRESH_SEEDS
    assert not fresh.seed_was_explicit


def test_ids_outside_the_vocabulary_and_adapters_that_are_not_mounted_are_refused():
    with pytest.raises(InvalidRequestError, match=r"options.eos_token_ids\[0\]"):
        resolve(GenerateOptions(eos_token_ids=(GEOMETRY.vocab_size,)))
    with pytest.raises(NotFoundError, match="no adapter named 'z'"):
        resolve(GenerateOptions(adapters=(AdapterSelection(id="z"),)))


def test_the_plan_of_execution_names_the_method_and_why_rows_are_not_packed():
    found = resolve_execution(model().composition, DECLARATION, prompt_cache=False)
    assert (found.method, found.mechanism, found.prompt_cache) == ("denoising", "continuous", False)
    assert found.reasons == ("canvases are computed one by one, so that nothing of a row depends on its company",)
