"""How long a token takes from the end of the engine's step to its client, at 16 streams, by the switch interval."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import PROMPT_TOKENS, Arena
from benchmarks.serving.cancelling import OBSERVED, read_notes
from benchmarks.serving.loads import NEW_TOKENS
from benchmarks.serving.timeline import percentile

if TYPE_CHECKING:
    from benchmarks.serving.contestants import MlxStreamServer
    from mlxstream import AsyncClient

STREAMS = 16
INTERVALS = {"default switch interval": signal.SIGUSR2, "switch interval 0.5 ms": signal.SIGUSR1}

Received = dict[tuple[str, int], float]


async def measure_delivery(arena: Arena) -> list[dict[str, Any]]:
    """Client's clock minus the observed server's clock, token by token; both settings in turns."""
    file = arena.workshop.logs / "delivery-notes.jsonl"
    server = arena.new_observed(f"{OBSERVED} for delivery", str(file))
    await arena.admit(server)
    received: list[tuple[dict[str, Any], Received]] = []
    try:
        for number in range(1 if arena.quick else 4):
            for interval, setting in INTERVALS.items():
                record, arrivals = await arena.turn(server, partial(receive_all, arena, setting))
                received.append((record | {"round": number, "interval": interval, "streams": STREAMS}, arrivals))
    finally:
        arena.dismiss(server)
    sent = {(name, index): at for at, kind, name, index in read_notes(file) if kind == "token"}
    return [record | account(sent, arrivals) for record, arrivals in received]


async def receive_all(arena: Arena, setting: signal.Signals, server: MlxStreamServer) -> Received:
    """Run all streams under one setting."""
    server.child.tell(setting)
    async with server.connected() as client:
        prompts = arena.prompts.draw(STREAMS, PROMPT_TOKENS)
        parts = await asyncio.gather(*(receive(client, prompt) for prompt in prompts))
    return {key: at for part in parts for key, at in part.items()}


async def receive(client: AsyncClient, prompt: str) -> Received:
    """Run one stream; gives when each token came."""
    arrivals: Received = {}
    stream = client.stream(prompt, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=[])
    async for event in stream.events():
        now = time.monotonic()
        generation_id = stream.started.generation_id if stream.started else ""
        arrivals |= {(generation_id, token.index): now for token in event.chunk.tokens}
    return arrivals


def account(sent: Received, arrivals: Received) -> dict[str, Any]:
    """Spread of the delay of all tokens of one load."""
    delays = [at - sent[key] for key, at in arrivals.items()]
    return {
        "tokens": len(delays),
        "delay_p50_seconds": percentile(delays, 50),
        "delay_p99_seconds": percentile(delays, 99),
        "delay_longest_seconds": max(delays),
    }
