"""`python -m benchmarks.durability [--quick]`: the cost of checkpoints, as ratios within one process.

Plain and durable generations of one prompt take turns in one engine; each pair gives one ratio of decode times and one
of processor times. One durable run more is taken apart: the processor time that is spent on taking, handing over and
writing checkpoints, against that of all the rest, which holds on a busy machine too.
Goal: at most 3% at 64 tokens on the demo model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.durability.parts import spent_on_checkpoints
from benchmarks.serving.calibration import machine_facts
from benchmarks.serving.environments import REPOSITORY
from engine.contracts.events import GenerationFinished, GenerationRequest
from engine.contracts.options import GenerateOptions
from engine.contracts.prompt import TokenPrompt
from engine.execution.engine import Engine
from engine.execution.resident import EngineSettings

if TYPE_CHECKING:
    from engine.execution.engine import Generation

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT_TOKENS = 200


def main() -> None:
    """Measure, keep, show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 pairs of 192 tokens instead of 9 of 256; rough")
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--every-tokens", type=int, default=64, help="tokens between two checkpoints")
    parser.add_argument("--rows", type=int, default=1, help="generations at once")
    arguments = parser.parse_args()
    pairs, tokens = (3, 192) if arguments.quick else (9, 256)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(arguments, Path(folder), pairs, tokens))
    document = {
        "quick": arguments.quick,
        "machine": machine_facts(REPOSITORY),
        "every_tokens": arguments.every_tokens,
        "generated_tokens": tokens,
        "rows": arguments.rows,
        **found,
    }
    RESULTS.mkdir(exist_ok=True)
    name = "quick" if arguments.quick else "full"
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for measure_name in ("wall", "processor"):
        ratios = document["ratios"][measure_name]
        print(f"{measure_name:>9}: durable / plain = {statistics.median(ratios):.3f} (each: {ratios})")
    parts = document["parts"]
    print(f"    parts: {parts['share']:.4f} of the rest is spent on {parts['checkpoints']} checkpoints: {parts}")


async def measure(arguments: argparse.Namespace, folder: Path, pairs: int, tokens: int) -> dict[str, Any]:
    """Pairs of runs, the order within a pair changing from one to the next."""
    engine = Engine(EngineSettings(model=arguments.model, state_dir=folder, prefix_cache_bytes=0))
    info = await engine.start()
    options = GenerateOptions(max_tokens=tokens, eos_token_ids=())
    durable = GenerateOptions(max_tokens=tokens, eos_token_ids=(), checkpoint_every_tokens=arguments.every_tokens)
    prompt = TokenPrompt(tuple(range(1000, 1000 + PROMPT_TOKENS)))
    await run(engine, GenerationRequest(prompt=prompt, options=durable), arguments.rows)
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(pairs):
        pair = {}
        for kind in ("plain", "durable")[:: 1 if number % 2 else -1]:
            asked = GenerationRequest(prompt=prompt, options=options if kind == "plain" else durable)
            pair[kind] = await run(engine, asked, arguments.rows)
        runs.append(pair)
    with spent_on_checkpoints() as parts:
        whole = await run(engine, GenerationRequest(prompt=prompt, options=durable), arguments.rows)
    await engine.stop()
    ratios = {
        name: [round(pair["durable"][name] / pair["plain"][name], 4) for pair in runs] for name in ("wall", "processor")
    }
    return {"model": info.name, "ratios": ratios, "seconds": runs, "parts": parts.told(whole["processor"])}


async def run(engine: Engine, asked: GenerationRequest, rows: int) -> dict[str, float]:
    """Decode time of `rows` equal generations at once, and the processor time of all of it, in seconds."""
    started = time.process_time()
    generations, folders = [], []
    for _ in range(rows):
        folder = None
        if asked.options.checkpoint_every_tokens is None:
            generations.append(await engine.generate(asked))
        else:
            acceptance = await engine.prepare(asked)
            folder = engine.durable_store.create(acceptance.generation_id, acceptance.checkpoint_key)
            generations.append(engine.begin(asked, acceptance, folder))
        folders += [] if folder is None else [folder]
    ends = await asyncio.gather(*(ended(generation) for generation in generations))
    spent = time.process_time() - started
    for folder in folders:
        folder.remove(leave_mark=False)
    return {"wall": round(max(end.stats.decode_ms for end in ends) / 1000, 4), "processor": round(spent, 4)}


async def ended(generation: Generation) -> GenerationFinished:
    """The end, every event read as it comes."""
    while not isinstance(event := await generation.next_event(), GenerationFinished):
        pass
    return event


if __name__ == "__main__":
    main()
