"""Where cases play: the servers that `cases.json` describes, each started when a case first needs it.

A case that kills or drains its server asks for one of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import uuid
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.conformance.runner.canned import CannedServer
from clients.conformance.runner.certificates import make_certificates
from clients.conformance.runner.programs import Program
from clients.conformance.runner.proxy import Proxy
from clients.conformance.runner.servers import Server

EXAMPLE_SECONDS = 60.0
TOKENS = """[tester]
token = "correct-horse-battery-staple-0001"

[operator]
token = "correct-horse-battery-staple-0003"
permissions = ["admin"]
"""


class Stage:
    """Owner of all servers of one run. `folder` takes their state, logs and certificates."""

    def __init__(self, root: Path, folder: Path, descriptions: Mapping[str, Mapping[str, Any]]) -> None:
        self._root = root
        self._folder = folder
        self._descriptions = descriptions
        self._shared: dict[str, Server] = {}
        self._canned: CannedServer | None = None
        self._starting = asyncio.Lock()
        self._count = 0
        self._sockets = Path(tempfile.mkdtemp(prefix="mlx-"))  # a socket's path must be short

    def prepare(self) -> None:
        """Make what flags refer to: certificates and a file of tokens.

        Raises:
            NoOpensslError: certificates cannot be made here.
        """
        make_certificates(self._folder / "certificates")
        tokens = self._folder / "tokens"
        tokens.write_text(TOKENS, encoding="utf-8")
        tokens.chmod(0o600)

    async def server(self, name: str, *, own: bool) -> Server:
        """A running server as described under `name` (or under what that is `like`); a fresh one for a case's `own`."""
        description = self._descriptions[name]
        if "like" in description:
            return await self.server(description["like"], own=own)
        if own:
            return await self._started(name)
        async with self._starting:
            if name not in self._shared:
                self._shared[name] = await self._started(name)
            return self._shared[name]

    async def _started(self, name: str) -> Server:
        description = self._descriptions[name]
        self._count += 1
        folder = self._folder / f"{name}-{self._count}"
        flags = [self._filled(flag) for flag in description.get("flags", ())]
        listen = self._filled(description.get("listen", "127.0.0.1:0"))
        server = Server(root=self._root, folder=folder, flags=flags, listen=listen)
        await server.start()
        return server

    async def canned(self) -> CannedServer:
        """The server that answers with canned bytes."""
        async with self._starting:
            if self._canned is None:
                self._canned = CannedServer()
                await self._canned.start()
            return self._canned

    async def proxy(self, server: Server) -> Proxy:
        """A network to `server` that can be cut; the case ends it."""
        proxy = Proxy(server.target)
        await proxy.start()
        return proxy

    async def program(self, language: str) -> Program:
        """A program of a language for one case alone, which ends it."""
        return await Program.start(language, self._root, self._folder / f"{language}.log")

    async def example(self, language: str, name: str, target: str) -> dict[str, Any]:
        """Run an example of a client against the server at `target`: its `status`, and what it printed."""
        script = f"clients/{language}/conformance/example.sh"
        process = await asyncio.create_subprocess_exec(
            "sh", script, name, target, cwd=self._root, stdout=PIPE, stderr=STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), EXAMPLE_SECONDS)
        except TimeoutError:
            process.kill()
            output, _ = await process.communicate()
        return {"status": process.returncode, "output": output.decode(errors="replace")}

    def connection(self, name: str, target: str) -> dict[str, Any]:
        """How a client reaches a server of the description `name` at `target`."""
        text = json.dumps(self._descriptions.get(name, {}).get("connection", {}))
        return {"target": target, **json.loads(self._filled(text))}

    def filled(self, value: Any) -> Any:
        """`value` with the names of this run's files in place of their marks, and of `{unique}` a word of its own."""
        return json.loads(self._filled(json.dumps(value)))

    async def close(self) -> None:
        """End every server."""
        await asyncio.gather(*(server.stop() for server in self._shared.values()))
        if self._canned is not None:
            await self._canned.stop()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _filled(self, text: str) -> str:
        marks = {
            **{f"{{{path.stem}}}": path for path in (self._root / "clients/conformance").glob("*script.json")},
            "{certificates}": self._folder / "certificates",
            "{tokens}": self._folder / "tokens",
            "{socket}": self._sockets / "service.sock",
            "{closed_port}": _closed_port(),
            "{unique}": uuid.uuid4().hex[:8],
        }
        for mark, value in marks.items():
            text = text.replace(mark, str(value))
        return text


def _closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
