"""Servers under the cases: the real one over the script, started and ended as a case says, and what its log tells."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.json_format import MessageToDict

from mlxstream.v1 import admin_pb2, admin_pb2_grpc

START_SECONDS = 60.0
END_SECONDS = 20.0
LOOK_SECONDS = 0.02
LOAD_SECONDS = 10.0
LOST_BYTES = 100
"""More than the last mark of a token log, and less than the log of a few tokens."""
_SERVING = re.compile(rb"serving \S+ on (\S+)")
_FIELD = re.compile(r'(\w+)=("[^"]*"|\S*)')


class ServerError(Exception):
    """The server does not start or does not end."""


@dataclass(slots=True)
class Server:
    """One server process. `target` is where it listens; a restart listens there again."""

    root: Path
    folder: Path
    flags: Sequence[str]
    listen: str = "127.0.0.1:0"
    target: str = ""
    process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> Path:
        """What it wrote to standard error, over all its lives."""
        return self.folder / "server.log"

    async def start(self) -> None:
        """Start, and wait until it serves.

        Raises:
            ServerError: it does not.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "service.cli", "serve", "--listen", self.target or self.listen]
        command += ["--state-dir", str(self.folder / "state"), *self.flags]
        source = os.pathsep.join((str(self.root), str(self.root / "clients/python/src")))
        with self.log.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": source},
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        try:
            self.target = await asyncio.wait_for(self._served_at(self.process), START_SECONDS)
        except TimeoutError:
            raise ServerError(f"not serving after {START_SECONDS:g} s") from None

    async def _served_at(self, process: asyncio.subprocess.Process) -> str:
        while process.stdout is not None and (line := await process.stdout.readline()):
            if found := _SERVING.search(line):
                return found.group(1).decode()
        raise ServerError(f"ended at once: {self.log.read_text(errors='replace').strip()[-300:]}")

    def ask_to_stop(self) -> None:
        """Send SIGTERM: it drains."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End it without a word, as a crash does."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        """End it in order; by force if that takes too long."""
        self.ask_to_stop()
        if self.process is not None:
            try:
                await asyncio.wait_for(self.process.wait(), END_SECONDS)
            except TimeoutError:
                await self.kill()

    def forget(self) -> None:
        """Lose what was written last of each durable generation, as a machine does that loses its power."""
        for log in (self.folder / "state").rglob("tokens.log"):
            os.truncate(log, log.stat().st_size - LOST_BYTES)

    async def load(self) -> dict[str, Any]:
        """What it says of its load; nothing while it does not answer. Of a server without TLS and tokens."""
        async with grpc.aio.insecure_channel(self.target) as channel:
            try:
                found = await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(
                    admin_pb2.GetLoadRequest(), timeout=LOAD_SECONDS
                )
            except grpc.aio.AioRpcError:
                return {}
        return MessageToDict(found, preserving_proto_field_name=True)

    async def account(self, request_id: str, seconds: float) -> dict[str, str] | None:
        """What the log says of the end of a generation, or None when it says nothing for so long."""
        latest = time.monotonic() + seconds
        while True:
            for line in self.lines("generation finished"):
                if line.get("request_id") == request_id:
                    return line
            if time.monotonic() >= latest:
                return None
            await asyncio.sleep(LOOK_SECONDS)

    def lines(self, message: str) -> list[dict[str, str]]:
        """The fields of each line with `message`."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return [
            {name: value.strip('"') for name, value in _FIELD.findall(line)}
            for line in text.splitlines()
            if message in line
        ]
