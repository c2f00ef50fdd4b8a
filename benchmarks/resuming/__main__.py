"""`python -m benchmarks.resuming [--kills 200]`: kill servers, compare streams, and keep the account in `results/`."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.resuming.kills import Server, under_fire
from benchmarks.serving.calibration import machine_facts

if TYPE_CHECKING:
    from benchmarks.resuming.kills import Report

RESULTS = Path(__file__).resolve().parent / "results"
REPOSITORY = Path(__file__).resolve().parents[2]
STORAGES = ("plain", "affine8", "affine4-g32-start64", "turbo-k4v4")


def main() -> None:
    """Parse, kill, keep, show; the exit status is 1 if any stream differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resuming", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all, over the forms of storage")
    parser.add_argument("--model", required=True, help="alias, folder or .gguf file")
    parser.add_argument("--vocabulary", type=int, default=256, help="prompt ids are drawn below this")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--row-tile-tokens", type=int, default=8, help="exact rows; 0: off")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "machine": machine_facts(REPOSITORY),
        "model": Path(arguments.model).name,
        "storages": {},
    }
    for storage in STORAGES:
        document["storages"][storage] = asyncio.run(run(storage, arguments))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kills.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["storages"], indent=1))
    if any(one["different"] or one["lost_or_doubled"] for one in document["storages"].values()):
        raise SystemExit(1)


async def run(storage: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One form of storage."""
    flags = ["--kv-storage", storage]
    if arguments.row_tile_tokens:
        flags += ["--row-tile-tokens", str(arguments.row_tile_tokens)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = await under_fire(
            Server(arguments.model, Path(folder), flags),
            kills=-(-arguments.kills // len(STORAGES)),
            seed=arguments.seed,
            vocabulary=arguments.vocabulary,
            prompt_tokens=60,
            max_tokens=arguments.max_tokens,
            say=lambda text: print(f"{storage}: {text}", flush=True),
        )
    return account(report) | {"seconds": round(time.monotonic() - began, 1)}


def account(report: Report) -> dict[str, Any]:
    """Counts, and how soon streams went on after a kill, the start of the next process included."""
    seconds = sorted(report.recovery_seconds)
    return {
        "kills": report.kills,
        "kills_while_starting": report.early_kills,
        "streams": report.streams,
        "tokens": report.tokens,
        "interruptions": report.interruptions,
        "resumptions": report.resumptions,
        "different": report.different,
        "lost_or_doubled": report.lost_or_doubled,
        "recovery_seconds": {"median": round(statistics.median(seconds), 2), "longest": round(seconds[-1], 2)}
        if seconds
        else {},
    }


if __name__ == "__main__":
    main()
