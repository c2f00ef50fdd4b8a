"""Driving an engine on a tiny model: its settings, and a whole generation in one call."""

import asyncio

from engine.contracts.events import GenerationFinished, GenerationRequest, GenerationStarted, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TokenPrompt
from engine.execution.resident import EngineSettings
from tests.engine.models.tiny_llama import random_prompt


def settings(folder, tmp_path, **changes):
    """Settings of an engine that computes every prompt from its start, unless `changes` say otherwise."""
    values = {"state_dir": tmp_path / "state", "max_rows": 8, "device": "cpu", "prefix_cache_bytes": 0}
    return EngineSettings(**({"model": str(folder)} | values | changes))


async def run(engine, prompt, *, request_id="", event_seconds=60, **options):
    generation = await engine.generate(
        GenerationRequest(prompt=prompt, options=GenerateOptions(**options), request_id=request_id)
    )
    return await collect(generation, event_seconds)


async def collect(generation, event_seconds=60):
    """Started, all token ids, joined text, the end."""
    started, ids, text = None, [], ""
    while True:
        event = await asyncio.wait_for(generation.next_event(), event_seconds)
        if isinstance(event, GenerationStarted):
            started = event
        elif isinstance(event, TokensGenerated):
            ids += [token.token for token in event.tokens]
            text += event.text
        elif isinstance(event, GenerationFinished):
            return started, ids, text, event


def tokens(seed, length):
    return TokenPrompt(tuple(random_prompt(seed, length)))
