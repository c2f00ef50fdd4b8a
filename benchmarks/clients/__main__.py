"""`python -m benchmarks.clients`: every client against one scripted server, at 1 and at 64 streams, in one table.

Rates: the server does not think, and sends each token as a message of its own as fast as it can, so at 64 streams the
rate is that of server and client together on one machine. What is added to the first text (the client's time from call
to text, less the server's own time from arrival to token) is measured on streams that are paced, a token every 50 ms,
so that there is a queue at neither end. Programs are built as releases are (that of Rust by cargo's `--release`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.report import plot, table
from clients.conformance.runner.programs import Program
from clients.conformance.runner.servers import Server

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
ANSWER_SECONDS = 300.0
LOADS = {1: 12, 64: 128}
"""Streams side by side, and in all."""
WARM_UP_STREAMS = 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.clients", description=__doc__)
    parser.add_argument("languages", nargs="*", help="default: all whose program is there")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the median counts")
    arguments = parser.parse_args()
    listed = [entry["language"] for entry in json.loads((ROOT / "clients/conformance/clients.json").read_text())]
    languages = arguments.languages or [name for name in listed if program_of(name).exists()]
    build(languages)
    machine = {"system": platform.system(), "cpus": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    measured = asyncio.run(measure(languages, arguments.rounds))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "clients.json").write_text(json.dumps({"machine": machine, "clients": measured}, indent=1) + "\n")
    (RESULTS / "clients.md").write_text(table(measured))
    (RESULTS / "clients.svg").write_text(plot(measured))
    sys.stdout.write(table(measured))
    return 0


def build(languages: list[str]) -> None:
    """Build what is to be measured; Rust's programs anew, since those of the tests are not optimised."""
    for script in [program_of(language).with_name("build.sh") for language in languages]:
        if script.exists():
            subprocess.run(["sh", str(script)], cwd=ROOT, check=True)
    if "rust" in languages:
        os.environ["RUST_BUILD"] = "release"  # for its run.sh
        cargo = ["cargo", "build", "--quiet", "--locked", "--release", "--example", "conformance"]
        manifest = ["--manifest-path", "clients/rust/Cargo.toml", "--target-dir", "build/rust"]
        subprocess.run([*cargo, *manifest], cwd=ROOT, check=True)


def program_of(language: str) -> Path:
    return ROOT / f"clients/{language}/conformance/run.sh"


async def measure(languages: list[str], rounds: int) -> dict[str, Any]:
    """Rounds go through all languages in turn, so that a slow minute of the machine meets them all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = Path(__file__).parent / "script.json"
        flags = ["--engine", f"script:{script}", "--max-rows", "128"]
        server = Server(root=ROOT, folder=folder, flags=flags)
        await server.start()
        programs: dict[str, Program] = {}
        try:
            for language in languages:
                programs[language] = await Program.start(language, ROOT, folder / "program.log")
                await burst(programs[language], server, "fast", streams=4, count=WARM_UP_STREAMS)
            taken: dict[str, dict[int, list[Any]]] = {language: {load: [] for load in LOADS} for language in languages}
            for _ in range(rounds):
                for streams, count in LOADS.items():
                    for language in languages:
                        fast = await burst(programs[language], server, "fast", streams=streams, count=count)
                        paced = await burst(programs[language], server, "paced", streams=streams, count=2 * count)
                        taken[language][streams].append((fast, paced))
        finally:
            for program in programs.values():
                await program.end()
            await server.stop()
    return {
        language: {str(streams): summary(answers) for streams, answers in by_load.items()}
        for language, by_load in taken.items()
    }


async def burst(program: Program, server: Server, scenario: str, *, streams: int, count: int) -> dict[str, Any]:
    number = await program.ask(
        {
            "do": "burst",
            "server": {"target": server.target},
            "prompt": {"text": f"[[{scenario}]]"},
            "delivery": {"max_tokens_per_message": 1},
            "timeout_seconds": ANSWER_SECONDS,
            "streams": streams,
            "count": count,
        }
    )
    answer = await program.answer(number, ANSWER_SECONDS)
    if answer.get("finished") != count:
        raise RuntimeError(f"not all streams finished: {answer}")
    return answer


def summary(answers: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    return {
        "messages_per_second": round(statistics.median([fast["messages"] / fast["seconds"] for fast, _ in answers])),
        "added_ms_p50": round(statistics.median([paced["added_ms"]["p50"] for _, paced in answers]), 2),
        "added_ms_p99": round(statistics.median([paced["added_ms"]["p99"] for _, paced in answers]), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
