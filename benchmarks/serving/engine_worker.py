"""Our engine without a network: reads loads as JSON lines, runs them through the front door, writes the timelines.

Run by the product's interpreter: `python -m benchmarks.serving.engine_worker MODEL STATE`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from benchmarks.serving.timeline import Timeline
from engine.contracts.events import GenerationFinished, GenerationRequest, TokensGenerated
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TextPrompt
from engine.execution.engine import Engine
from engine.execution.resident import EngineSettings


async def serve(model: str, state: Path) -> None:
    """Answer until the input ends."""
    engine = Engine(EngineSettings(model=model, state_dir=state))
    await engine.start()
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            load = json.loads(line)
            requests = (run(engine, prompt, load["max_tokens"]) for prompt in load["prompts"])
            timelines = await asyncio.gather(*requests)
            sys.stdout.write(json.dumps([timeline.to_message() for timeline in timelines]) + "\n")
            sys.stdout.flush()
    finally:
        await engine.stop()


async def run(engine: Engine, prompt: str, max_tokens: int) -> Timeline:
    """Run one generation and note when its tokens came."""
    timeline = Timeline(sent_at=time.monotonic())
    options = GenerateOptions(max_tokens=max_tokens, eos_token_ids=(), temperature=0.0)
    generation = await engine.generate(GenerationRequest(prompt=TextPrompt(prompt), options=options))
    while True:
        event = await generation.next_event()
        if isinstance(event, TokensGenerated) and event.tokens:
            timeline.arrivals.append((time.monotonic(), len(event.tokens)))
        if isinstance(event, GenerationFinished):
            if event.error is not None:
                raise event.error
            return timeline


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
