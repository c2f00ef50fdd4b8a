"""`python -m benchmarks.soak [--minutes 20]`: serve a model under mixed load, watch it, and say whether it leaks.

Starts the server as a process of its own, with metrics. Exits with 0 when all goals are met. Results go to
`results/soak.json` here, or nowhere with --dry.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.soak.callers import Callers
from benchmarks.soak.watching import Look, files_by_kind, look, slope_per_minute
from mlxstream.v1 import model_pb2, model_pb2_grpc

RESULTS = Path(__file__).resolve().parent / "results"
LOOK_SECONDS = 5.0
QUIET_SECONDS = 30.0
# How long durable streams that have ended, or that nobody reads, are held; each holds a folder.
GRACE_SECONDS = 3.0
# Goals: what resident memory may gain in a minute once it is warm, and what may be left of files and tasks at rest.
MOST_BYTES_PER_MINUTE = 1024 * 1024
MOST_FILES_LEFT = 8
MOST_TASKS_LEFT = 2


def main() -> int:
    """Run, show, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="alias or folder")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    arguments = parser.parse_args()
    document = asyncio.run(soak(arguments))
    print(json.dumps({name: value for name, value in document.items() if name != "looks"}, indent=1))
    if not arguments.dry:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "soak.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0 if all(document["goals"].values()) else 1


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """One soak from start to end."""
    with tempfile.TemporaryDirectory() as state:
        server, target, metrics_url = await _start(arguments, Path(state))
        try:
            callers = Callers(
                target,
                prompt_tokens=arguments.prompt_tokens,
                max_tokens=arguments.max_tokens,
                vocabulary=await _vocabulary(target),
            )
            await callers.learn()
            rest, files = look(metrics_url, 0.0), [files_by_kind(server.pid)]
            looks = await _under_load(arguments, callers, metrics_url)
            after = await _at_rest(metrics_url, rest)
            files.append(files_by_kind(server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            status = await asyncio.wait_for(server.wait(), 30)
    return _document(arguments, callers, rest, looks, after, status, files)


async def _start(arguments: argparse.Namespace, state: Path) -> tuple[asyncio.subprocess.Process, str, str]:
    ports = [_free_port(), _free_port()]
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli", "serve", "--model", arguments.model, "--listen", f"127.0.0.1:{ports[0]}",
        "--metrics-listen", f"127.0.0.1:{ports[1]}", "--state-dir", str(state), "--max-rows", str(arguments.max_rows),
        "--row-tile-tokens", "8", "--log-level", "warning",
        "--resume-grace-seconds", str(GRACE_SECONDS), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    line = (await server.stdout.readline()).decode()
    if not re.match(r"serving ", line):
        raise SystemExit("the server did not start")
    return server, f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/metrics"


async def _under_load(arguments: argparse.Namespace, callers: Callers, metrics_url: str) -> list[Look]:
    began, looks = time.monotonic(), []
    tasks = [asyncio.create_task(callers.run(number)) for number in range(arguments.callers)]
    while (elapsed := time.monotonic() - began) < 60 * arguments.minutes:
        looks.append(await asyncio.to_thread(look, metrics_url, elapsed))
        await asyncio.sleep(LOOK_SECONDS)
        if not sys.stdout.isatty() or callers.tally.wrong or callers.tally.surprises:
            print(f"{elapsed / 60:5.1f} min {looks[-1]} {dict(callers.tally.ends)}", file=sys.stderr)
    callers.ending = True
    await asyncio.gather(*tasks)
    gc.collect()  # a closed channel keeps its connection for as long as a call of its that was left early is there
    return looks


async def _at_rest(metrics_url: str, rest: Look) -> Look:
    """The server once nobody asks any more."""
    began = time.monotonic()
    while True:
        now = await asyncio.to_thread(look, metrics_url, 0.0)
        quiet = not now.running and not now.waiting and now.loop_tasks <= rest.loop_tasks + MOST_TASKS_LEFT
        quiet = quiet and now.open_files <= rest.open_files + MOST_FILES_LEFT
        if quiet or time.monotonic() - began > QUIET_SECONDS:
            return now
        await asyncio.sleep(0.5)


async def _vocabulary(target: str) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        return int((await stub.GetModel(model_pb2.GetModelRequest())).model.vocab_size)


def _document(
    arguments: argparse.Namespace,
    callers: Callers,
    rest: Look,
    looks: list[Look],
    after: Look,
    status: int,
    files: list[dict[str, int]],
) -> dict[str, Any]:
    tally, slope = callers.tally, slope_per_minute(looks)
    return {
        "model": Path(arguments.model).name,
        "minutes": arguments.minutes,
        "callers": arguments.callers,
        "machine": f"{platform.system()} {platform.machine()}",
        "calls": sum(tally.ways.values()),
        "ways": dict(tally.ways),
        "ends": dict(tally.ends),
        "tokens_read": tally.tokens,
        "wrong": tally.wrong[:20],
        "surprises": tally.surprises[:20],
        "resident_mb": {
            "at_rest_before": round(rest.resident_bytes / 1e6, 1),
            "under_load": [round(one.resident_bytes / 1e6, 1) for one in (looks[len(looks) // 2], looks[-1])],
            "at_rest_after": round(after.resident_bytes / 1e6, 1),
            "gained_per_minute": round(slope / 1e6, 3),
        },
        "open_files": [rest.open_files, after.open_files],
        "open_files_by_kind": files,
        "loop_tasks": [rest.loop_tasks, after.loop_tasks],
        "rows_left": after.running + after.waiting,
        "goals": {
            "no wrong ids": not tally.wrong,
            "no UNKNOWN, no INTERNAL": not tally.surprises,
            "memory is flat": slope < MOST_BYTES_PER_MINUTE,
            "no files left": after.open_files <= rest.open_files + MOST_FILES_LEFT,
            "no tasks left": after.loop_tasks <= rest.loop_tasks + MOST_TASKS_LEFT,
            "no rows left": after.running + after.waiting == 0,
            "a clean end": status == 0,
        },
        "looks": [one.as_dict() for one in looks[:: max(1, len(looks) // 60)]],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
