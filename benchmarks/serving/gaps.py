"""What a running stream feels while a prompt of 1,000 tokens loads beside it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import MLX_LM, OURS, PROMPT_TOKENS, SMG, Arena
from benchmarks.serving.contestants import MlxStreamServer
from benchmarks.serving.timeline import Timeline, median

if TYPE_CHECKING:
    from benchmarks.serving.contestants import Server

LONG_PROMPT_TOKENS = 1000
RUNNING_TOKENS = 400
TOKENS_BEFORE, TOKENS_AFTER = 24, 4
LIMIT_SECONDS = 120.0
SMALL_STEPS = f"{MLX_LM}, prefill step 64"


async def measure_gaps(arena: Arena) -> list[dict[str, Any]]:
    """Longest and median gap of one stream, before and while the long prompt loads."""
    small_steps = arena.new_mlx_lm(SMALL_STEPS, options=("--prefill-step-size", "64"))
    await arena.admit(small_steps)
    records = []
    try:
        contestants = [*[await arena.server(name) for name in (OURS, MLX_LM, SMG)], small_steps]
        for number in range(1 if arena.quick else 3):
            for contestant in contestants:
                record, watched = await arena.turn(contestant, partial(watch_one_stream, arena))
                record |= {"round": number, **watched}
                records.append(record)
                arena.say(
                    f"{contestant.name:32s} gap {1000 * record['median_gap_seconds']:.0f} ms alone, while loading"
                    f" {1000 * record['loading_median_gap_seconds']:.0f} ms, at most"
                    f" {1000 * record['loading_longest_gap_seconds']:.0f} ms"
                )
    finally:
        arena.dismiss(small_steps)
    return records


async def watch_one_stream(arena: Arena, server: Server) -> dict[str, Any]:
    """Run one stream, load the prompt beside it, and stop when that has given its first token."""
    running, long = arena.prompts.draw(1, PROMPT_TOKENS)[0], arena.prompts.draw(1, LONG_PROMPT_TOKENS)[0]
    timeline = Timeline(sent_at=time.monotonic())
    loading: asyncio.Task[float] | None = None
    load_began = after = 0.0
    async with asyncio.timeout(LIMIT_SECONDS), AsyncExitStack() as stack:
        if isinstance(server, MlxStreamServer):
            await stack.enter_async_context(server.connected())
        stream = await stack.enter_async_context(aclosing(server.stream(running, RUNNING_TOKENS)))
        async for arrival in stream:
            timeline.arrivals.append(arrival)
            if len(timeline.arrivals) == TOKENS_BEFORE:
                load_began = time.monotonic()
                loading = asyncio.ensure_future(first_token(server, long))
            if loading is not None and loading.done():
                after += 1
                if after > TOKENS_AFTER:
                    break
        if loading is None:
            raise RuntimeError(f"{server.name} ended its stream early")
        load_ended = await loading
    before = timeline.gaps(end=load_began)[1:-1]
    during = timeline.gaps(load_began, load_ended)
    return {
        "load_seconds": load_ended - load_began,
        "median_gap_seconds": median(before),
        "loading_median_gap_seconds": median(during),
        "loading_longest_gap_seconds": max(during),
    }


async def first_token(server: Server, prompt: str) -> float:
    """When the first token of `prompt` arrived."""
    async with aclosing(server.stream(prompt, 1)) as stream:
        times = [time async for time, _ in stream]
    return times[0]
