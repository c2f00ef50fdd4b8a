"""From the command to readiness and to the first answer, everything cached, in turns."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import MLX_LM, OURS, SMG, Arena
from benchmarks.serving.contestants import POLL_SECONDS, START_SECONDS, MlxStreamServer
from benchmarks.serving.quiet import ForeignWork
from benchmarks.serving.timeline import median

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.serving.contestants import Server

READY_LINE = b"serving "


async def measure_start(arena: Arena) -> list[dict[str, Any]]:
    """Start and stop each server in turns; the running ones are paused all the while."""
    makers: dict[str, Callable[[], Server]] = {
        OURS: lambda: arena.new_ours("mlx-stream, starting"),
        MLX_LM: lambda: arena.new_mlx_lm("mlx_lm.server, starting"),
        SMG: arena.new_smg,
    }
    records: list[dict[str, Any]] = []
    rounds = 1 if arena.quick else 5
    for number in range(-1, rounds):  # the first round fills the caches
        for name, make in makers.items():
            await arena.quiet.wait()
            server = make()
            try:
                foreign = ForeignWork(server.child.cpu_seconds)
                seconds = await start_once(server)
                circumstances = {"foreign_cores": foreign.cores()}
            finally:
                server.child.stop()
            if number >= 0:
                records.append({"contestant": name, "round": number, **circumstances, **seconds})
    for name in makers:
        first = median([record["first_answer_seconds"] for record in records if record["contestant"] == name])
        arena.say(f"{name:28s} first answer {first:.2f} s after its start")
    return records


async def start_once(server: Server) -> dict[str, float | None]:
    """Seconds until the server says it is ready (where it does), and until its first answer has come."""
    deadline = server.child.started_at + START_SECONDS
    ready_seconds = await _says_ready(server) if isinstance(server, MlxStreamServer) else None
    while True:
        try:
            timelines = await server.run(["The capital of France is"], 1)
            break
        except Exception:  # whatever a server says while it starts
            server.child.require_running()
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_SECONDS)
    first_answer = timelines[0].arrivals[0][0] - server.child.started_at
    return {"ready_seconds": ready_seconds, "first_answer_seconds": first_answer}


async def _says_ready(server: Server) -> float:
    async with asyncio.timeout(START_SECONDS):
        while READY_LINE not in server.child.log.read_bytes():
            server.child.require_running()
            await asyncio.sleep(POLL_SECONDS / 4)
    return time.monotonic() - server.child.started_at
