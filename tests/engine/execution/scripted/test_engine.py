"""A scripted engine is the real one over a script: what is played, when it ends, and that no mlx is needed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    EngineFailedError,
    GenerationFailedError,
    NotFoundError,
    OverloadedError,
    UnsupportedOptionError,
)
from engine.contracts.events import CanvasRevised, GenerationFinished, GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import ChatMessage, ChatPrompt, Prompt, TextPart, TextPrompt, TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution.engine import EngineState
from engine.execution.resident import EngineSettings
from engine.execution.scripted.engine import ScriptedEngine
from tests.engine.execution.driving import collect, run

SCENARIOS = {
    "count": {"say": ["one ", "two ", "three "]},
    "split": {"say": ["a", {"bytes": "f09f"}, {"bytes": "9880"}]},
    "long": {"say": [{"text": "tick ", "times": 1000, "every_seconds": 0.01}]},
    "thinks": {"prefill_seconds": 60, "say": ["never"]},
    "breaks": {"say": ["a ", {"fail": "generation"}]},
    "dies": {"say": ["a ", {"fail": "engine"}]},
    "busy": {"refuse": {"times": 1, "with": "overloaded", "retry_after_seconds": 0.5}, "say": ["at last"]},
}
Opened = Callable[..., Awaitable[ScriptedEngine]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    engines: list[ScriptedEngine] = []

    async def open_engine(*, scenarios: dict[str, Any] = SCENARIOS, **settings: Any) -> ScriptedEngine:
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"model": {"name": "play"}, "scenarios": scenarios}), encoding="utf-8")
        engine = ScriptedEngine(EngineSettings(model="", state_dir=tmp_path / "state", **settings), script)
        engines.append(engine)
        await engine.start()
        return engine

    yield open_engine
    for engine in engines:
        await engine.stop()


def chosen(name: str) -> TextPrompt:
    return TextPrompt(f"[[{name}]]")


@pytest.mark.parametrize(
    "prompt",
    [
        chosen("count"),
        TokenPrompt(tuple(b"[[count]]")),
        ChatPrompt(messages=(ChatMessage(role="user", content=(TextPart("[[count]]"),)),)),
    ],
)
async def test_a_prompt_of_any_kind_plays_the_scenario_that_it_names(opened: Opened, prompt: Prompt) -> None:
    engine = await opened()
    started, ids, text, end = await run(engine, prompt)
    assert (ids, text, end.finish_reason) == ([257, 258, 259], "one two three ", FinishReason.STOP)
    assert end.stats.generated_tokens == 4
    assert started.model == "play"
    assert started.prompt_tokens == end.stats.prompt_tokens > 8


async def test_the_real_text_rules_hold_over_a_script(opened: Opened) -> None:
    engine = await opened()
    assert (await run(engine, chosen("split")))[2] == "a😀"
    _, _, text, end = await run(engine, chosen("count"), stop_sequences=("o th",))
    assert (text, end.matched_stop) == ("one tw", "o th")
    _, ids, _, end = await run(engine, chosen("count"), max_tokens=2)
    assert (len(ids), end.finish_reason) == (2, FinishReason.LENGTH)


async def test_rows_play_side_by_side(opened: Opened) -> None:
    engine = await opened(max_rows=64)
    ends = await asyncio.gather(*(run(engine, chosen(name)) for name in ["count", "split"] * 20))
    assert {text for _, _, text, _ in ends} == {"one two three ", "a😀"}


@pytest.mark.parametrize("name", ["long", "thinks"])
async def test_an_abort_ends_a_pause(opened: Opened, name: str) -> None:
    engine = await opened()
    generation = await engine.generate(GenerationRequest(prompt=chosen(name), options=GenerateOptions()))
    await generation.next_event()
    generation.abort(AbortReason.REQUESTED)
    _, ids, _, end = await collect(generation, event_seconds=60)
    assert end.finish_reason is FinishReason.CANCELLED
    assert end.stats.generated_tokens == len(ids) < 1000


async def test_a_failure_ends_its_generation_alone(opened: Opened) -> None:
    engine = await opened()
    (_, _, text, end), (_, _, whole, _) = await asyncio.gather(
        run(engine, chosen("breaks")), run(engine, chosen("count"))
    )
    assert (text, type(end.error)) == ("a ", GenerationFailedError)
    assert whole == "one two three "


async def test_a_script_can_end_the_engine(opened: Opened) -> None:
    engine = await opened()
    _, _, text, end = await run(engine, chosen("dies"))
    assert (text, type(end.error)) == ("a ", EngineFailedError)
    await asyncio.wait_for(engine.wait_failed(), 60)
    assert engine.state is EngineState.FAILED


async def test_a_request_is_refused_as_often_as_the_script_says(opened: Opened) -> None:
    engine = await opened()
    with pytest.raises(OverloadedError) as refused:
        await run(engine, chosen("busy"), request_id="mine")
    assert refused.value.retry_after_seconds == 0.5
    assert (await run(engine, chosen("busy"), request_id="mine"))[2] == "at last"
    with pytest.raises(OverloadedError):
        await run(engine, chosen("busy"), request_id="another's")


async def test_a_scenario_that_is_not_there_is_refused_by_name(opened: Opened) -> None:
    engine = await opened()
    with pytest.raises(NotFoundError, match="no scenario named 'nope'"):
        await run(engine, chosen("nope"))


async def test_log_probabilities_come_when_they_are_asked_for(opened: Opened) -> None:
    engine = await opened()
    generation = await engine.generate(
        GenerationRequest(prompt=chosen("count"), options=GenerateOptions(logprobs=True, top_logprobs=3))
    )
    tokens: list[Any] = []
    while not isinstance(event := await generation.next_event(), GenerationFinished):
        tokens += event.tokens if isinstance(event, TokensGenerated) else ()
    assert [token.logprobs.logprob for token in tokens] == [-0.25] * 3
    assert [candidate.token for candidate in tokens[0].logprobs.top] == [257, 0, 1]


async def test_a_script_of_blocks_revises_canvases_and_commits_the_last_of_each(opened: Opened) -> None:
    blocks = [[["??", "??"], ["a ", "??"], ["a ", "b "]], [["c "]]]
    engine = await opened(scenarios={"blocks": {"blocks": blocks}})
    request = GenerationRequest(prompt=chosen("blocks"), options=GenerateOptions(), draft_blocks=True)
    generation = await engine.generate(request)
    seen: list[CanvasRevised] = []
    text = ""
    while not isinstance(event := await generation.next_event(), GenerationFinished):
        seen += [event] if isinstance(event, CanvasRevised) else []
        text += event.text if isinstance(event, TokensGenerated) else ""
    assert (text, event.finish_reason) == ("a b c ", FinishReason.STOP)
    assert [canvas.block_index for canvas in seen if canvas.committed] == [0, 1]


async def test_no_other_model_is_loaded_over_a_script(opened: Opened) -> None:
    engine = await opened()
    with pytest.raises(UnsupportedOptionError, match="this engine plays a script"):
        await engine.load_model("smollm2-135m")


def test_a_scripted_engine_never_imports_mlx() -> None:
    code = "import sys, engine.execution.scripted.engine; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
