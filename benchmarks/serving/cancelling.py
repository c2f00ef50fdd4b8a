"""What happens when a client leaves: how soon we free its row, and how long a server goes on computing for nobody."""

from __future__ import annotations

import asyncio
import json
import random
import time
from bisect import bisect
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import MLX_LM, OURS, PROMPT_TOKENS, SMG, Arena
from benchmarks.serving.contestants import MlxStreamServer
from benchmarks.serving.gaps import LONG_PROMPT_TOKENS
from benchmarks.serving.timeline import percentile

if TYPE_CHECKING:
    from benchmarks.serving.contestants import Server
    from mlxstream import AsyncClient

Note = tuple[float, str, str, int]
Left = list[tuple[str, float]]

OBSERVED = "mlx-stream, observed"
NEIGHBOURS = 15
NEIGHBOURS_SETTLE_SECONDS = 3.0
IDLE_SHARE, IDLE_SECONDS, WATCH_SECONDS, WATCH_LIMIT_SECONDS = 0.05, 0.5, 0.05, 30.0
SCENES = ("decoding alone", f"decoding beside {NEIGHBOURS}", f"prefilling {LONG_PROMPT_TOKENS} tokens")


async def measure_cancel(arena: Arena) -> list[dict[str, Any]]:
    """From the client's cancel to the free row, in three scenes, by the notes of an observed server."""
    file = arena.workshop.logs / "cancel-notes.jsonl"
    server = arena.new_observed(OBSERVED, str(file))
    await arena.admit(server)
    cancels: dict[str, tuple[dict[str, Any], Left]] = {}
    try:
        for scene in SCENES:
            cancels[scene] = await arena.turn(server, partial(play, arena, scene))
    finally:
        arena.dismiss(server)
    notes = read_notes(file)
    return [record | {"scene": scene, **account(notes, left)} for scene, (record, left) in cancels.items()]


async def play(arena: Arena, scene: str, server: MlxStreamServer) -> Left:
    """Leave many streams in one scene."""
    async with server.connected() as client:
        if scene == SCENES[2]:
            return await leave_often(arena, client, 6 if arena.quick else 40, prompt_tokens=LONG_PROMPT_TOKENS)
        if scene == SCENES[0]:
            return await leave_often(arena, client, 10 if arena.quick else 60, prompt_tokens=8)
        neighbours = [asyncio.ensure_future(_keep_running(arena, client)) for _ in range(NEIGHBOURS)]
        await asyncio.sleep(NEIGHBOURS_SETTLE_SECONDS)
        try:
            return await leave_often(arena, client, 10 if arena.quick else 60, prompt_tokens=8)
        finally:
            for neighbour in neighbours:
                neighbour.cancel()
            await asyncio.gather(*neighbours, return_exceptions=True)


async def leave_often(arena: Arena, client: AsyncClient, times: int, *, prompt_tokens: int) -> Left:
    """Start and cancel one stream after the other; gives (generation id, when cancel was called).

    A short prompt's stream is left after a few tokens; a long prompt's at a random time after it was admitted.
    """
    source = random.Random(prompt_tokens)
    left = []
    for _ in range(times):
        stream = client.stream(
            arena.prompts.draw(1, prompt_tokens)[0], max_tokens=400, temperature=0.0, eos_token_ids=[]
        )
        events = stream.events()
        await anext(events)
        if prompt_tokens < LONG_PROMPT_TOKENS:
            for _ in range(source.randint(2, 5)):
                await anext(events)
        await asyncio.sleep(source.uniform(0.0, 0.4 if prompt_tokens >= LONG_PROMPT_TOKENS else 0.05))
        left.append((stream.started.generation_id if stream.started else "", time.monotonic()))
        stream.cancel()
        await asyncio.sleep(0.3)
    return left


async def _keep_running(arena: Arena, client: AsyncClient) -> None:
    while True:
        stream = client.stream(arena.prompts.draw(1, 8)[0], max_tokens=1000, temperature=0.0, eos_token_ids=[])
        async with stream:
            async for _ in stream.events():
                pass


def read_notes(file: Path) -> list[Note]:
    """The notes of an observed server that has ended."""
    notes = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((float(at), str(kind), str(name), int(number)) for at, kind, name, number in notes)


def account(notes: list[Note], left: Left) -> dict[str, Any]:
    """Times from cancel to signal and to the free row, beside the step in hand when the signal was raised."""
    at = {(kind, name): time for time, kind, name, _ in notes}
    between_steps = sorted({time for time, kind, _, _ in notes if kind != "aborted"})
    signal, inside, whole, own_step = [], [], [], []
    for name, cancelled_at in left:
        raised, freed = at[("aborted", name)], at[("finished", name)]
        signal.append(raised - cancelled_at)
        inside.append(freed - raised)
        whole.append(freed - cancelled_at)
        place = bisect(between_steps, raised)
        own_step.append(between_steps[place] - between_steps[place - 1])
    shares = [seconds / step for seconds, step in zip(inside, own_step, strict=True)]
    return {
        "signal_to_free_p99_steps": percentile(shares, 99),
        "cancels": len(left),
        **_spread("client_to_signal", signal),
        **_spread("signal_to_free", inside),
        **_spread("client_to_free", whole),
        **_spread("step", own_step),
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    return {
        f"{name}_p50_seconds": percentile(seconds, 50),
        f"{name}_p99_seconds": percentile(seconds, 99),
        f"{name}_longest_seconds": max(seconds),
    }


async def measure_leaving(arena: Arena) -> list[dict[str, Any]]:
    """Processor time that a server spends after its only client has left, decoding and prefilling."""
    records = []
    for number in range(1 if arena.quick else 3):
        for name in (OURS, MLX_LM, SMG):
            server = await arena.server(name)
            for scene in (SCENES[0], SCENES[2]):
                record, spent = await arena.turn(server, partial(leave_once, arena, scene == SCENES[2]))
                records.append(record | {"round": number, "scene": scene, **spent})
                arena.say(
                    f"{name:28s} {scene}: {spent['cpu_seconds']:.2f} s of processor time after the client left,"
                    f" idle after {spent['busy_seconds']:.2f} s"
                )
    return records


async def leave_once(arena: Arena, prefilling: bool, server: Server) -> dict[str, float]:
    """Leave one stream and watch the processor time until it stands still."""
    prompt = arena.prompts.draw(1, LONG_PROMPT_TOKENS if prefilling else PROMPT_TOKENS)[0]
    async with AsyncExitStack() as stack:
        if isinstance(server, MlxStreamServer):
            await stack.enter_async_context(server.connected())
        reading = asyncio.ensure_future(_read(server, prompt, 400, stop_after=None if prefilling else 8))
        await asyncio.wait([reading], timeout=0.5 if prefilling else 60.0)
        left_at, cpu_then = time.monotonic(), server.child.cpu_seconds()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        return await _watch(server, left_at, cpu_then)


async def _read(server: Server, prompt: str, max_tokens: int, stop_after: int | None) -> None:
    async with aclosing(server.stream(prompt, max_tokens)) as stream:
        count = 0
        async for _ in stream:
            count += 1
            if count == stop_after:
                return


async def _watch(server: Server, left_at: float, cpu_then: float) -> dict[str, float]:
    samples = [(left_at, cpu_then)]
    while time.monotonic() - left_at < WATCH_LIMIT_SECONDS:
        await asyncio.sleep(WATCH_SECONDS)
        samples.append((time.monotonic(), server.child.cpu_seconds()))
        past = [sample for sample in samples if sample[0] <= samples[-1][0] - IDLE_SECONDS]
        if past and samples[-1][1] - past[-1][1] <= IDLE_SHARE * IDLE_SECONDS:
            break
    spent = samples[-1][1] - cpu_then
    busy_until = next(at for at, cpu in samples if samples[-1][1] - cpu <= IDLE_SHARE * IDLE_SECONDS)
    return {"cpu_seconds": spent, "busy_seconds": busy_until - left_at}
