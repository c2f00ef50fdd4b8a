"""Where contestants meet: it starts them, gives them their turns one at a time, and stops them all in every case.

While one has its turn, all others are stopped processes: their idle loops and spinning threads cost it nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from benchmarks.serving.calibration import loop_rate
from benchmarks.serving.contestants import (
    LOOPBACK,
    SETTLE_SECONDS,
    MlxLmServer,
    MlxStreamServer,
    Server,
    SmgServer,
    Worker,
    free_port,
)
from benchmarks.serving.environments import REPOSITORY, python_path
from benchmarks.serving.processes import Child
from benchmarks.serving.quiet import ForeignWork, Quiet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.serving.contestants import Contestant
    from benchmarks.serving.environments import Workshop
    from benchmarks.serving.prompts import Prompts


T = TypeVar("T")
Someone = TypeVar("Someone", bound="Contestant")
Blas = Literal["plain", "shim", "stock"]
LENT = "with our shim"

OURS = "mlx-stream"
IN_PROCESS = "engine in process"
MLX_LM = "mlx_lm.server"
SMG = "smg MLX servicer"
STREAM_GENERATE = "stream_generate"
ATTEMPTS, PATIENCE_SECONDS = 3, 1500.0
WARM_UP_STREAMS, WARM_UP_TOKENS, PROMPT_TOKENS = 4, 4, 100


class Arena:
    """Owner of all children. Close it in every case."""

    def __init__(
        self, workshop: Workshop, model: str, prompts: Prompts, *, quick: bool, say: Callable[[str], None]
    ) -> None:
        """Nothing runs yet. `model` is what our side loads; the peers load the same weights from the workshop."""
        self.prompts = prompts
        self.quick = quick
        self.say = say
        self.workshop = workshop
        self.quiet = Quiet(0.0 if quick else PATIENCE_SECONDS)
        self.circumstances: list[dict[str, Any]] = []
        self._model = model
        self._present: dict[str, Contestant] = {}

    async def contestant(self, name: str) -> Contestant:
        """The contestant of that name, started and warmed at first use."""
        if name not in self._present:
            makers: dict[str, Callable[[], Contestant]] = {
                OURS: self.new_ours,
                IN_PROCESS: self.new_engine_worker,
                MLX_LM: self.new_mlx_lm,
                SMG: self.new_smg,
                STREAM_GENERATE: self.new_stream_generate,
            }
            await self.admit(makers[name]())
        return self._present[name]

    async def server(self, name: str) -> Server:
        """The contestant of that name, which has a network in between."""
        contestant = await self.contestant(name)
        if not isinstance(contestant, Server):
            raise TypeError(f"{name} is not a server")
        return contestant

    async def admit(self, contestant: Contestant, *, warm: bool = True) -> None:
        """Wait for a started contestant, warm it, and pause it."""
        self.say(f"starting {contestant.name}")
        self._present[contestant.name] = contestant
        await contestant.ready()
        if warm:
            await contestant.run(self.prompts.draw(WARM_UP_STREAMS, PROMPT_TOKENS), WARM_UP_TOKENS)
        contestant.child.pause()

    async def turn(self, contestant: Someone, action: Callable[[Someone], Awaitable[T]]) -> tuple[dict[str, Any], T]:
        """Let one contestant run while nothing else does; gives a record of the circumstances, and what `action` gave.

        When other processes took part of the machine it is done again, as long as there is patience; the attempt that
        was disturbed least is kept.
        """
        attempts: list[tuple[dict[str, Any], T]] = []
        for _ in range(ATTEMPTS):
            await self.quiet.wait()
            began = time.monotonic()
            attempts.append(await self._attempt(contestant, action))
            if not self.quiet.wants_another(attempts[-1][0]["foreign_cores"], time.monotonic() - began):
                break
        record, result = min(attempts, key=lambda attempt: attempt[0]["foreign_cores"] or 0.0)
        self.circumstances.append(record)
        return record, result

    async def _attempt(self, one: Someone, action: Callable[[Someone], Awaitable[T]]) -> tuple[dict[str, Any], T]:
        record: dict[str, Any] = {"contestant": one.name, "loop_rate": loop_rate()}
        one.child.require_running()
        one.child.resume()
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            foreign, cpu_before = ForeignWork(one.child.cpu_seconds), one.child.cpu_seconds()
            result = await action(one)
            spent = one.child.cpu_seconds() - cpu_before
            return record | {"foreign_cores": foreign.cores(), "server_cpu_seconds": spent}, result
        finally:
            one.child.pause()

    def dismiss(self, contestant: Contestant) -> None:
        """Stop one contestant for good."""
        self._present.pop(contestant.name, None)
        contestant.child.stop()

    def close(self) -> None:
        """Stop everybody."""
        for contestant in list(self._present.values()):
            with suppress(OSError):
                self.dismiss(contestant)

    def new_ours(self, name: str = OURS) -> MlxStreamServer:
        """Our server, as it is installed."""
        port = free_port()
        return MlxStreamServer(name, self._spawn(name, [sys.executable, "-m", "service.cli", *self._serve(port)]), port)

    def new_observed(self, name: str, notes: str) -> MlxStreamServer:
        """Our server with notes of its steps, written to `notes` when it ends."""
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.serving.observed_server", notes, *self._serve(port)]
        return MlxStreamServer(name, self._spawn(name, command), port)

    def new_engine_worker(self) -> Worker:
        """Our engine alone."""
        command = [sys.executable, "-m", "benchmarks.serving.engine_worker", self._model, str(self.workshop.state)]
        return Worker(IN_PROCESS, self._spawn(IN_PROCESS, command, speaks=True))

    def new_mlx_lm(self, name: str = MLX_LM, *, blas: Blas = "plain", options: tuple[str, ...] = ()) -> MlxLmServer:
        """mlx_lm.server on the exported weights, over the OpenBLAS that we use."""
        port = free_port()
        where = ["--model", str(self.workshop.model), "--host", LOOPBACK, "--port", str(port)]
        command = [*self._peer(str(self.workshop.mlx_lm), blas, "mlx_lm.server:main"), *where, *options]
        return MlxLmServer(name, self._spawn(name, command), port)

    def new_smg(self) -> SmgServer:
        """The smg MLX servicer on the exported weights."""
        port = free_port()
        where = ["--model", str(self.workshop.model), "--host", LOOPBACK, "--port", str(port)]
        command = [*self._peer(str(self.workshop.smg), "plain", "smg_grpc_servicer.mlx.server:main"), *where]
        return SmgServer(SMG, self._spawn(SMG, command), port, self.prompts.ids)

    def new_stream_generate(self, name: str = STREAM_GENERATE, *, blas: Blas = "plain") -> Worker:
        """mlx-lm's own loop for one request."""
        target = "benchmarks.serving.mlx_lm_worker:main"
        command = [*self._peer(str(self.workshop.mlx_lm), blas, target), str(self.workshop.model)]
        return Worker(name, self._spawn(name, command, speaks=True))

    def _serve(self, port: int) -> list[str]:
        return [
            "serve",
            "--model",
            self._model,
            "--listen",
            f"{LOOPBACK}:{port}",
            "--state-dir",
            str(self.workshop.state),
        ]

    def _peer(self, python: str, blas: Blas, target: str) -> list[str]:
        return [python, "-m", "benchmarks.serving.launch_peer", blas, str(self.workshop.state), target]

    def _spawn(self, name: str, command: list[str], *, speaks: bool = False) -> Child:
        stem = "".join(character if character.isalnum() else "-" for character in name)
        log = self.workshop.logs / f"{stem}-{time.time_ns() // 10**6}.log"
        variables = {
            "PYTHONPATH": python_path(),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.workshop.bytecode),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        return Child(command, log=log, environment=variables, folder=REPOSITORY, speaks=speaks)
