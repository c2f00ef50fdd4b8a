"""No option is accepted and ignored: each has a pair of requests that it tells apart, or is refused by name.

The walk is over the contract's own fields, so that a new one without a pair fails here.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import pytest

from engine.contracts.errors import UnsupportedOptionError
from engine.contracts.events import GenerationFinished, GenerationRequest, TokensGenerated
from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.contracts.option_groups import (
    AdapterSelection,
    CacheOptions,
    Constraint,
    DenoisingOptions,
    SpeculationOptions,
)
from engine.contracts.options import GenerateOptions
from engine.execution.engine import Engine
from engine.generation.row import Row
from tests.engine.adapters import tiny_adapters
from tests.engine.execution.driving import run, settings, tokens

GREEDY: Mapping[str, Any] = MappingProxyType({"max_tokens": 16, "eos_token_ids": ()})
DRAWN: Mapping[str, Any] = MappingProxyType({**GREEDY, "temperature": 1.5, "seed": 5})
PROMPT = tokens(3, 20)
COLD, WARM = CacheOptions(bypass=True), CacheOptions()
LONG_PROMPT = tokens(2, 40)
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@dataclass(frozen=True)
class Outcome:
    """All that a caller sees, and in which units the row was computed."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    matched_stop: str
    logprobs: tuple[object, ...]
    cached_tokens: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """Two requests that differ by `changed` alone, and must differ in what `seen` names.

    `changed` may be made from what the first request gave.
    """

    changed: Mapping[str, Any] | Callable[[Outcome], Mapping[str, Any]]
    first: Mapping[str, Any] = field(default_factory=lambda: DRAWN)
    seen: str = "ids"

    def second(self, outcome: Outcome) -> dict[str, Any]:
        """The options of the second request."""
        return {**self.first, **(self.changed(outcome) if callable(self.changed) else self.changed)}


def hlg(curve: Any, **first: Any) -> Pair:
    """A tone curve in place of the draw, or in place of another one."""
    return Pair({"hlg": curve}, {**DRAWN, **first})


SHAPER = HlgShaper(window=4.0, max_brightness=6.0)
TOE = HlgShaper(window=3.0, max_brightness=15.0, x_m=0.95, y_m=0.9, x_floor=0.4, y_floor=0.2)
GAPS = HlgShaper(window=12.0, target_gap=5.0)
SOFT = HlgParametric(gain=2.0, width=0.5, shoulder=1.0, toe=1.0, pivot_offset=2.0)
PAIRS: dict[str, list[Pair]] = {
    "max_tokens": [Pair({"max_tokens": 3})],
    "eos_token_ids": [Pair(lambda first: {"eos_token_ids": (first.ids[2],)})],
    "stop_sequences": [Pair(lambda first: {"stop_sequences": (first.text[3:5],)}, seen="text")],
    "prefill_chunk_size": [Pair({"prefill_chunk_size": 2}, seen="widths")],
    "temperature": [Pair({"temperature": 0.0}), Pair({"temperature": 0.9})],
    "top_p": [Pair({"top_p": 0.5})],
    "top_k": [Pair({"top_k": 2})],
    "min_p": [Pair({"min_p": 0.5})],
    "min_tokens_to_keep": [Pair({"min_tokens_to_keep": 40}, {**DRAWN, "min_p": 1.0})],
    "seed": [Pair({"seed": 6}), Pair({"seed": 5 + 2**63}), Pair({"seed": 5 + 2**32})],
    "hlg": [
        *(hlg(curve) for curve in (HlgParametric(gain=0.2), HlgOetf(), HlgEotf(), HlgPipeline(), SHAPER)),
        hlg(HlgParametric(gain=0.5), hlg=HlgParametric(gain=0.2)),
        *(
            hlg(dataclasses.replace(SOFT, **change), hlg=SOFT)
            for change in (
                {"width": 3.0},
                {"shoulder": 0.01},
                {"toe": 0.01},
                {"pivot": "entropy"},
                {"pivot": "median"},
                {"pivot_offset": 0.0},
            )
        ),
        hlg(HlgEotf(lw=100.0), hlg=HlgEotf()),
        hlg(HlgPipeline(max_brightness=20.0), hlg=HlgPipeline()),
        hlg(HlgPipeline(lw=100.0), hlg=HlgPipeline()),
        *(
            hlg(dataclasses.replace(SHAPER, **change), hlg=SHAPER)
            for change in (
                {"window": 10.0},
                {"lw": 100.0},
                {"x_m": 0.9},
                {"y_m": 0.9},
                {"s_m": 5.0},
                {"shoulder_a": 0.01},
                {"max_brightness": 3.0},
            )
        ),
        *(
            hlg(dataclasses.replace(TOE, **change), hlg=TOE)
            for change in ({"x_floor": 0.8}, {"y_floor": 0.85}, {"p": 0.2})
        ),
        hlg(dataclasses.replace(GAPS, target_gap=12.0), hlg=GAPS),
        hlg(dataclasses.replace(GAPS, ref_gap=1.0), hlg=GAPS),
    ],
    "curve": [
        Pair({"curve": ((0.0, 0.0), (1.0, 40.0), (100.0, 60.0))}),
        Pair({"curve": ((1.0, 100.0), (100.0, 1.0))}, {**GREEDY, "curve": ((1.0, 1.0), (100.0, 100.0)), "seed": 5}),
    ],
    "logit_bias": [Pair(lambda first: {"logit_bias": ((first.ids[0], -100.0),)}), Pair({"logit_bias": ((7, 100.0),)})],
    "repetition_penalty": [Pair({"repetition_penalty": 0.01})],
    "repetition_context_size": [Pair({"repetition_context_size": 2}, {**DRAWN, "repetition_penalty": 0.01})],
    "presence_penalty": [Pair({"presence_penalty": 50.0}), Pair({"presence_penalty": -50.0})],
    "presence_context_size": [Pair({"presence_context_size": 2}, {**DRAWN, "presence_penalty": -50.0})],
    "frequency_penalty": [Pair({"frequency_penalty": 50.0}), Pair({"frequency_penalty": -50.0})],
    "frequency_context_size": [Pair({"frequency_context_size": 2}, {**DRAWN, "frequency_penalty": -50.0})],
    "xtc_probability": [Pair({"xtc_probability": 1.0, "xtc_threshold": 0.01})],
    "xtc_threshold": [Pair({"xtc_threshold": 0.01}, {**DRAWN, "xtc_probability": 1.0, "xtc_threshold": 0.1})],
    "xtc_special_tokens": [
        Pair({"xtc_special_tokens": tuple(range(259))}, {**DRAWN, "xtc_probability": 1.0, "xtc_threshold": 0.01})
    ],
    "logprobs": [Pair({"logprobs": True}, seen="logprobs"), Pair({"logprobs": True}, GREEDY, seen="logprobs")],
    "top_logprobs": [
        Pair({"top_logprobs": 3}, seen="logprobs"),
        Pair({"top_logprobs": 3}, {**GREEDY, "logprobs": True, "top_logprobs": 2}, seen="logprobs"),
    ],
}
PLAIN_ADAPTER, STRONGER = ({"adapters": (AdapterSelection(id="a", scale=scale),)} for scale in (None, 9.0))
PAIRS["adapters"] = [Pair(PLAIN_ADAPTER), Pair(STRONGER, DRAWN | PLAIN_ADAPTER)]
REFUSED: dict[str, list[Any]] = {
    "constraint": [
        *(Constraint(kind=kind, source="{}") for kind in ("json_schema", "regex", "grammar")),
        Constraint(kind="json_object"),
        Constraint(kind="choice", choices=("a",)),
    ],
    "speculation": [SpeculationOptions(draft_tokens=2)],
    "fill": ["strict", "echo"],
    "denoising": [DenoisingOptions(full_canvas=True)],
}
SHARING = ("cache", "cache_session_id")
"""What never changes the tokens, only how much of a prompt is computed: see the last tests."""
KEEPING = ("checkpoint_every_tokens",)
"""What is heard where a generation is durable: see `test_durable_generations.py`."""


@pytest.fixture
async def engine(folder, tmp_path):
    """One that keeps the states of prompts."""
    async with storing(folder, tmp_path, None) as engine:
        yield engine


@pytest.fixture
def widths(monkeypatch):
    """Widths of each row's units, by the row."""
    seen: dict[Row, list[int]] = {}
    settle = Row.settle

    def watched(row, unit):
        seen.setdefault(row, []).append(len(unit.tokens))
        settle(row, unit)

    monkeypatch.setattr(Row, "settle", watched)
    return seen


async def outcome(engine, widths, options, cache=COLD):
    """Run one request to its end, by default without the states of others."""
    asked = GenerateOptions(cache=cache, **options)
    generation = await engine.generate(GenerationRequest(prompt=PROMPT, options=asked))
    shown, text = [], ""
    while not isinstance(event := await asyncio.wait_for(generation.next_event(), 60), GenerationFinished):
        if isinstance(event, TokensGenerated):
            shown += event.tokens
            text += event.text
    return Outcome(
        ids=tuple(token.token for token in shown),
        text=text,
        finish_reason=event.finish_reason.value,
        matched_stop=event.matched_stop,
        logprobs=tuple(token.logprobs for token in shown),
        cached_tokens=event.stats.cached_tokens,
        widths=tuple(widths.get(generation._row, ())),
    )


def numbers(outcome):
    """Every log-probability, in order."""
    told = [one for one in outcome.logprobs if one is not None]
    return [number for one in told for number in (one.logprob or 0.0, *(each.logprob for each in one.top))]


def test_every_option_has_a_pair_or_is_refused():
    names = [*PAIRS, *REFUSED, *SHARING, *KEEPING]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(GenerateOptions))


def test_every_parameter_of_a_tone_curve_has_a_pair():
    changed = {
        (type(pair.changed["hlg"]), one.name)
        for pair in PAIRS["hlg"]
        for one in dataclasses.fields(pair.changed["hlg"])
        if type(pair.first.get("hlg")) is type(pair.changed["hlg"])
        and getattr(pair.first["hlg"], one.name) != getattr(pair.changed["hlg"], one.name)
    }
    curves = (HlgParametric, HlgOetf, HlgEotf, HlgPipeline, HlgShaper)
    assert changed == {(curve, one.name) for curve in curves for one in dataclasses.fields(curve)}


@pytest.mark.parametrize("name", PAIRS)
async def test_an_option_changes_the_result_alone_in_company_and_with_a_known_prompt(engine, widths, name):
    for pair in PAIRS[name]:
        first = await outcome(engine, widths, pair.first)
        second = await outcome(engine, widths, pair.second(first))
        assert getattr(first, pair.seen) != getattr(second, pair.seen), pair
        neighbours = [{**DRAWN, "seed": 9, "max_tokens": 24}, GREEDY]
        company = await asyncio.gather(
            *(outcome(engine, widths, one) for one in (neighbours[0], pair.first, pair.second(first), neighbours[1]))
        )
        assert [one.ids for one in company[1:3]] == [first.ids, second.ids], pair
        assert [one.text for one in company[1:3]] == [first.text, second.text], pair
        for beside, alone in zip(company[1:3], (first, second), strict=True):
            assert numbers(beside) == pytest.approx(numbers(alone), abs=1e-4), pair
    await outcome(engine, widths, pair.first, WARM)
    warm = await outcome(engine, widths, pair.second(first), WARM)
    assert (warm.cached_tokens > 0) is (name != "adapters")  # another strength writes other states
    assert (warm.ids, warm.text) == (second.ids, second.text)


@pytest.mark.parametrize("name", REFUSED)
async def test_an_option_that_cannot_act_is_refused_by_name(engine, name):
    for value in REFUSED[name]:
        with pytest.raises(UnsupportedOptionError) as caught:
            await run(engine, PROMPT, **GREEDY, **{name: value})
        assert caught.value.option == f"options.{name}"


@contextlib.asynccontextmanager
async def storing(folder, tmp_path, limit_bytes):
    """An engine that keeps the states of prompts within a limit."""
    tensors = {
        f"model.layers.1.self_attn.o_proj.lora_{half}": mx.random.normal(shape, key=mx.random.key(seed))
        for seed, (half, shape) in enumerate({"a": (64, 4), "b": (4, 64)}.items())
    }
    adapters = (("a", tiny_adapters.write_mlx(tmp_path / "a", tensors)),)
    engine = Engine(settings(folder, tmp_path, prefix_cache_bytes=limit_bytes, adapters=adapters))
    await engine.start()
    yield engine
    await engine.stop()


async def cached_tokens(engine, prompt, **options):
    """Tokens of the prompt that had not to be computed."""
    return (await run(engine, prompt, max_tokens=2, eos_token_ids=(), **options))[3].stats.cached_tokens


async def test_the_cache_options_change_how_much_of_a_prompt_is_computed(folder, tmp_path):
    async with storing(folder, tmp_path, None) as engine:
        await cached_tokens(engine, LONG_PROMPT)
        assert await cached_tokens(engine, LONG_PROMPT) > 0
        assert await cached_tokens(engine, LONG_PROMPT, cache=CacheOptions(bypass=True)) == 0
        assert await cached_tokens(engine, LONG_PROMPT, cache=CacheOptions(salt="a")) == 0
        assert await cached_tokens(engine, LONG_PROMPT, cache=CacheOptions(salt="a")) > 0


@pytest.mark.parametrize(("session", "kept"), [({}, False), ({"cache_session_id": "talk"}, True)])
async def test_a_session_keeps_its_prompt_where_others_crowd_it_out(folder, tmp_path, session, kept):
    async with storing(folder, tmp_path, 110 * BYTES_PER_TOKEN) as engine:
        await cached_tokens(engine, LONG_PROMPT, **session)
        for seed in range(5, 10):
            await cached_tokens(engine, tokens(seed, 40))
        assert (await cached_tokens(engine, LONG_PROMPT, **session) > 0) is kept
