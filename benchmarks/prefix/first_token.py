"""Time to first token of long prompts: read from the start, begun with a kept prefix, and asked again.

Contestants take turns, each in every round; a round's cold prompt is new to everybody.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import MLX_LM, OURS, Arena

if TYPE_CHECKING:
    from benchmarks.serving.contestants import Server

Records = list[dict[str, Any]]

PREFIX_TOKENS, MORE_TOKENS, NEW_TOKENS = 2000, 20, 4
COLD, EXTENDED, REPEATED = "cold", "begun with its prefix", "asked again"


async def measure_first_token(arena: Arena) -> Records:
    """A prompt of 2,000 tokens, then the same with 20 more, then the first one again."""
    records: Records = []
    for number in range(1 if arena.quick else 5):
        (prompt,) = arena.prompts.draw(1, PREFIX_TOKENS)
        (more,) = arena.prompts.draw(1, MORE_TOKENS)
        asked = {COLD: prompt, EXTENDED: f"{prompt}\n{more}", REPEATED: prompt}
        names = (OURS, MLX_LM) if number % 2 == 0 else (MLX_LM, OURS)
        for name in names:
            server = await arena.server(name)
            for kind, text in asked.items():
                circumstances, seconds = await arena.turn(server, partial(_first_token, prompt=text))
                records.append(circumstances | {"round": number, "kind": kind, "first_token_seconds": seconds})
                arena.say(f"{name:<16} {kind:<22} {seconds:7.3f} s")
    return records


async def _first_token(server: Server, *, prompt: str) -> float:
    (timeline,) = await server.run([prompt], NEW_TOKENS)
    return timeline.first_token_seconds
