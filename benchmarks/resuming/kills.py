"""Kills a server at random moments while durable streams run, and compares what they bring with uninterrupted runs.

Everything is drawn from one seed but the moments themselves, which depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstream import AsyncClient, Durability, Interruption, Resumption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxstream import DurableEvent

REPOSITORY = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0
# A process is killed so long after its start, or after it serves: uniformly, and once in a while before it does.
LIFE_SECONDS = 0.7
# How long a stream gets to come back before that begins, so that most kills meet one.
RETURN_SECONDS = 3.0
EARLY_SHARE = 0.15
EARLY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one stream has brought, and what it went through."""

    ids: tuple[int, ...]
    indices: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    interruptions: int = 0
    resumptions: int = 0

    @property
    def lost_or_doubled(self) -> bool:
        """Whether a token is missing or came twice."""
        return self.indices != tuple(range(len(self.indices)))

    def equals(self, other: Outcome) -> bool:
        """Whether both have brought the same."""
        return (self.ids, self.text, self.finish_reason) == (other.ids, other.text, other.finish_reason)


@dataclass(slots=True)
class Report:
    """What was seen so far. `recoveries_seconds` are the times from a kill to the next message of a stream."""

    kills: int = 0
    early_kills: int = 0
    streams: int = 0
    tokens: int = 0
    interruptions: int = 0
    resumptions: int = 0
    different: list[str] = field(default_factory=list)
    lost_or_doubled: list[str] = field(default_factory=list)
    recovery_seconds: list[float] = field(default_factory=list)


class Server:
    """One `mlx-stream serve` after another, at the same address and over the same state."""

    def __init__(self, model: str, state_dir: Path, flags: Sequence[str] = ()) -> None:
        """Nothing is started yet; `flags` are further ones for `serve`."""
        self.address = "127.0.0.1:0"  # until the first one has told which port it was given
        self._command = [sys.executable, "-m", "service.cli", "serve", "--model", model]
        self._command += ["--state-dir", str(state_dir), "--device", "cpu", "--log-level", "error", *flags]
        self._process: subprocess.Popen[str] | None = None

    def spawn(self) -> None:
        """Start a process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_STREAM_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "clients/python/src")])
        self._process = subprocess.Popen(
            [*self._command, "--listen", self.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    async def ready(self) -> None:
        """Wait until the process says that it serves."""
        process = self._running()
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), READY_SECONDS)
        if not line.startswith("serving "):
            raise RuntimeError(f"the server did not start: {process.communicate()[1][-2000:]}")
        self.address = line.split()[-1]

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        process = self._running()
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def _running(self) -> Any:
        if self._process is None:
            raise RuntimeError("no process was started")
        return self._process


def requests(rng: random.Random, *, vocabulary: int, prompt_tokens: int, max_tokens: int) -> list[dict[str, Any]]:
    """One request of each kind: seeded, penalised over everything, and greedy with all penalties."""
    common = {"max_tokens": max_tokens, "eos_token_ids": []}

    def prompt() -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(prompt_tokens)]

    return [
        {"prompt": prompt(), "temperature": 1.0, "top_p": 0.9, "seed": rng.getrandbits(63), **common},
        {
            "prompt": prompt(),
            "temperature": 0.8,
            "top_k": 40,
            "seed": rng.getrandbits(63),
            "repetition_penalty": 1.2,
            "repetition_context_size": 0,
            "frequency_penalty": 0.3,
            "frequency_context_size": 0,
            **common,
        },
        {"prompt": prompt(), "repetition_penalty": 1.3, "presence_penalty": 0.5, **common},
    ]


def with_stop(request: dict[str, Any], whole: Outcome) -> dict[str, Any]:
    """The same request with a stop string that is met late: a piece of the text that does not occur before."""
    for length in range(2, 40):
        piece = whole.text[-length - len(whole.text) // 5 :][:length]
        if piece and whole.text.find(piece) > len(whole.text) // 2:
            return {**request, "stop_sequences": [piece]}
    return request


async def uninterrupted(client: AsyncClient, request: dict[str, Any]) -> Outcome:
    """The request as an ordinary stream."""
    stream = client.stream(**request)
    return await _outcome(stream)


async def survived(client: AsyncClient, request: dict[str, Any], recoveries: _Recoveries) -> Outcome:
    """The request as a durable stream, through whatever happens to the server."""
    interruptions = resumptions = 0

    def count(event: DurableEvent) -> None:
        nonlocal interruptions, resumptions
        interruptions += isinstance(event, Interruption) and event.attempt == 1
        if isinstance(event, Resumption):
            resumptions += 1
            recoveries.note()

    stream = client.stream(
        **request,
        durable=Durability(on_event=count, patience_seconds=READY_SECONDS, first_patience_seconds=READY_SECONDS),
    )
    outcome = await _outcome(stream)
    return _with(outcome, interruptions=interruptions, resumptions=resumptions)


class _Recoveries:
    """Times from the newest kill to each return."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.killed_at = 0.0
        self.came = asyncio.Event()

    def note(self) -> None:
        self.came.set()
        self._report.recovery_seconds.append(time.monotonic() - self.killed_at)


async def _outcome(stream: Any) -> Outcome:
    ids, indices, text = [], [], []
    async for response in stream.events():
        for token in response.chunk.tokens:
            ids.append(token.token)
            indices.append(token.index)
        text.append(response.chunk.text)
    return Outcome(
        ids=tuple(ids),
        indices=tuple(indices),
        text="".join(text),
        finish_reason=str(stream.finish_reason),
        seed=stream.started.options.seed,
    )


def _with(outcome: Outcome, **changes: int) -> Outcome:
    values = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return Outcome(**values | changes)


async def under_fire(
    server: Server, *, kills: int, seed: int, vocabulary: int, prompt_tokens: int, max_tokens: int, say: Any = None
) -> Report:
    """Kill `server` so many times while rounds of streams run, and compare each of them."""
    rng, report = random.Random(seed), Report()
    server.spawn()
    try:
        await server.ready()
        while report.kills < kills:
            asked = requests(rng, vocabulary=vocabulary, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
            async with AsyncClient(server.address, timeout_seconds=None) as client:
                await client.wait_ready(timeout_seconds=READY_SECONDS)
                wholes = [await uninterrupted(client, request) for request in asked]
                asked.append(with_stop(asked[0], wholes[0]))
                wholes.append(await uninterrupted(client, asked[-1]))
                await _round(server, client, rng, asked, wholes, report, kills=kills)
            if say is not None:
                say(f"{report.kills} kills, {report.streams} streams, {len(report.different)} different")
    finally:
        with contextlib.suppress(RuntimeError):
            server.kill()
    return report


async def _round(
    server: Server,
    client: AsyncClient,
    rng: random.Random,
    asked: list[dict[str, Any]],
    wholes: list[Outcome],
    report: Report,
    *,
    kills: int,
) -> None:
    """Run all streams of a round side by side, and kill the server until they have ended."""
    recoveries = _Recoveries(report)
    recoveries.came.set()
    streams = [asyncio.ensure_future(survived(client, request, recoveries)) for request in asked]
    try:
        while report.kills < kills and not all(stream.done() for stream in streams):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(recoveries.came.wait(), RETURN_SECONDS)
            await asyncio.sleep(rng.uniform(0.0, LIFE_SECONDS))
            if all(stream.done() for stream in streams):
                break
            await _kill(server, rng, report, recoveries)
        _compare(await asyncio.gather(*streams), asked, wholes, report)
    finally:
        for stream in streams:
            stream.cancel()


async def _kill(server: Server, rng: random.Random, report: Report, recoveries: _Recoveries) -> None:
    """Kill the process and start another, once in a while one that does not live to serve."""
    recoveries.killed_at = time.monotonic()
    recoveries.came.clear()
    server.kill()
    report.kills += 1
    server.spawn()
    if rng.random() < EARLY_SHARE:
        await asyncio.sleep(rng.uniform(0.0, EARLY_SECONDS))
        server.kill()
        report.kills += 1
        report.early_kills += 1
        server.spawn()
    await server.ready()


def _compare(outcomes: list[Outcome], asked: list[dict[str, Any]], wholes: list[Outcome], report: Report) -> None:
    for outcome, request, whole in zip(outcomes, asked, wholes, strict=True):
        report.streams += 1
        report.tokens += len(outcome.ids)
        report.interruptions += outcome.interruptions
        report.resumptions += outcome.resumptions
        name = ", ".join(f"{name}={value!r}" for name, value in request.items() if name != "prompt")
        if not outcome.equals(whole):
            place = next((i for i, (a, b) in enumerate(zip(outcome.ids, whole.ids, strict=False)) if a != b), "end")
            report.different.append(f"{name}: at {place} of {len(outcome.ids)}/{len(whole.ids)} tokens")
        if outcome.lost_or_doubled:
            report.lost_or_doubled.append(name)
