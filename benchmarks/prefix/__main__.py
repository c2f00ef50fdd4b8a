"""`python -m benchmarks.prefix [--quick]`: measure, show, and keep the results in `results/`."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.prefix.first_token import measure_first_token
from benchmarks.prefix.report import plot, table
from benchmarks.serving.arena import Arena
from benchmarks.serving.calibration import machine_facts
from benchmarks.serving.environments import MLX_LM, REPOSITORY, Workshop, environment_with_repository
from benchmarks.serving.prompts import Prompts

RESULTS = Path(__file__).resolve().parent / "results"
BANDWIDTH_TOKENS = 2000
LIMIT_SECONDS = 30 * 60


def main() -> None:
    """Parse, prepare, measure, keep, show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round instead of five; rough")
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "build" / "benchmarks", help="where peers are installed"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args()
    workshop = Workshop(folder=arguments.folder.resolve())
    workshop.prepare(arguments.model)
    document = {
        "quick": arguments.quick,
        "seed": arguments.seed,
        "machine": machine_facts(REPOSITORY),
        "peers": [MLX_LM],
        "bandwidth": measure_bandwidth(workshop.folder, 1 if arguments.quick else 5),
        "first_token": asyncio.run(run(workshop, arguments)),
    }
    RESULTS.mkdir(exist_ok=True)
    name = "quick" if arguments.quick else "full"
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        (RESULTS / "first_token.svg").write_text(plot(document["first_token"]), encoding="utf-8")
    print(table(document))


async def run(workshop: Workshop, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Our server and mlx_lm.server in turns."""
    prompts = Prompts(workshop.model, seed=arguments.seed)
    arena = Arena(workshop, arguments.model, prompts, quick=arguments.quick, say=say)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await measure_first_token(arena)
    finally:
        arena.close()


def measure_bandwidth(folder: Path, rounds: int) -> dict[str, Any]:
    """Keeping and finding, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prefix.bandwidth", str(folder), str(BANDWIDTH_TOKENS), str(rounds)]
    done = subprocess.run(
        command,
        check=True,
        timeout=LIMIT_SECONDS,
        cwd=REPOSITORY,
        env=environment_with_repository(),
        stdout=subprocess.PIPE,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def say(line: str) -> None:
    """One line with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


if __name__ == "__main__":
    main()
