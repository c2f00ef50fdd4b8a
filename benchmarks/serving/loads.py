"""Many streams at once: rates and time to first token at each size of load, all contestants in turns.

`load` is a table of sizes; `decode` the rate while everybody decodes; `transport` our server against our engine in
process, `single` one stream against mlx-lm's own loop, `lent` a peer that was lent our shim, and `stock` the peer as
its Linux install comes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import IN_PROCESS, LENT, MLX_LM, OURS, PROMPT_TOKENS, SMG, STREAM_GENERATE, Arena
from benchmarks.serving.timeline import summarize_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.serving.contestants import Contestant
    from benchmarks.serving.prompts import Prompts
    from benchmarks.serving.timeline import Timeline

Records = list[dict[str, Any]]

NEW_TOKENS = 32
STOCK = f"{MLX_LM}, stock install"
SERVERS = (OURS, IN_PROCESS, MLX_LM, SMG)


async def measure_load(arena: Arena) -> Records:
    """1 to 32 streams of 100-token prompts and 32 new tokens."""
    sizes = (1, 16) if arena.quick else (1, 4, 8, 16, 32)
    rounds = 1 if arena.quick else 3
    contestants = [await arena.contestant(name) for name in SERVERS]
    return await in_turns(arena, contestants, [(size, PROMPT_TOKENS, NEW_TOKENS) for size in sizes], rounds)


async def measure_decode(arena: Arena) -> Records:
    """Short prompts and longer answers: the rate while all streams decode."""
    sizes = (16,) if arena.quick else (1, 16, 32)
    contestants = [await arena.contestant(name) for name in SERVERS]
    return await in_turns(arena, contestants, [(size, 8, 48) for size in sizes], 1 if arena.quick else 2)


async def measure_transport(arena: Arena) -> Records:
    """Our server and our engine in process, back to back."""
    contestants = [await arena.contestant(name) for name in (OURS, IN_PROCESS)]
    few = await in_turns(arena, contestants, [(1, PROMPT_TOKENS, NEW_TOKENS)], 3 if arena.quick else 12)
    many = await in_turns(arena, contestants, [(16, PROMPT_TOKENS, NEW_TOKENS)], 1 if arena.quick else 6)
    return [*few, *many]


async def measure_single(arena: Arena) -> Records:
    """One stream against `stream_generate` over the same OpenBLAS, and over our shim in front of it."""
    contestants = [await arena.contestant(name) for name in (OURS, IN_PROCESS, STREAM_GENERATE)]
    lent = arena.new_stream_generate(f"{STREAM_GENERATE}, {LENT}", blas="shim")
    await arena.admit(lent)
    try:
        rounds = 2 if arena.quick else 8
        return await in_turns(arena, [*contestants, lent], [(1, PROMPT_TOKENS, NEW_TOKENS)], rounds)
    finally:
        arena.dismiss(lent)


async def measure_lent(arena: Arena) -> Records:
    """16 streams against mlx_lm.server with our shim in front of its OpenBLAS: what is left without our products."""
    ours = await arena.contestant(OURS)
    lent = arena.new_mlx_lm(f"{MLX_LM}, {LENT}", blas="shim")
    await arena.admit(lent)
    try:
        return await in_turns(arena, [ours, lent], [(16, PROMPT_TOKENS, NEW_TOKENS)], 1 if arena.quick else 2)
    finally:
        arena.dismiss(lent)


async def measure_stock(arena: Arena) -> Records:
    """The peer's stock Linux install multiplies with the BLAS inside mlx; it is slow, so it gets one short load."""
    ours = await arena.contestant(OURS)
    stock = arena.new_mlx_lm(STOCK, blas="stock")
    await arena.admit(stock, warm=False)
    try:
        load = (1, PROMPT_TOKENS, 4) if arena.quick else (4, PROMPT_TOKENS, NEW_TOKENS)
        return await in_turns(arena, [ours, stock], [load], 1)
    finally:
        arena.dismiss(stock)


async def in_turns(
    arena: Arena, contestants: Sequence[Contestant], loads: Sequence[tuple[int, int, int]], rounds: int
) -> Records:
    """Every load (streams, prompt tokens, new tokens) by every contestant, in rounds that begin with another each."""
    records: Records = []
    for number in range(rounds):
        for streams, prompt_tokens, new_tokens in loads:
            first = number % len(contestants)
            for contestant in [*contestants[first:], *contestants[:first]]:
                send = partial(send_load, arena.prompts, streams, prompt_tokens, new_tokens)
                record, timelines = await arena.turn(contestant, send)
                record |= {"round": number, "streams": streams, **summarize_load(timelines)}
                record["tokens_per_cpu_second"] = record["tokens"] / record["server_cpu_seconds"]
                records.append(record)
                arena.say(
                    f"round {number + 1}/{rounds}  {streams:2d} streams  {contestant.name:28s}"
                    f" {record['end_to_end_tps']:7.1f} tok/s  first token {record['first_token_seconds']:.2f} s"
                    f"  {record['tokens_per_cpu_second']:.1f} tok/CPU s"
                    f"  others {record['foreign_cores'] or 0.0:.2f} cores"
                )
    return records


async def send_load(
    prompts: Prompts, streams: int, prompt_tokens: int, new_tokens: int, contestant: Contestant
) -> list[Timeline]:
    """Send fresh prompts all at once: a load that is done again must not find its prompts in a cache."""
    return await contestant.run(prompts.draw(streams, prompt_tokens), new_tokens)
