"""The program of one language: started once, asked by lines, answered by lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINE_LIMIT_BYTES = 64 * 1024 * 1024
END_SECONDS = 30.0


class ProgramError(Exception):
    """The program does not follow the contract, or has died."""


class Program:
    """A running client program, that of `language`. Requests are told apart by their ids."""

    def __init__(self, language: str, process: asyncio.subprocess.Process) -> None:
        self.language = language
        self._process = process
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._marks: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 1
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, language: str, root: Path, log: Path) -> Program:
        """Start that of `language` in `root`, the repository's; its standard error goes to `log`."""
        command = ["sh", str(root / f"clients/{language}/conformance/run.sh")]
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=root,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_LIMIT_BYTES,
            )
        return cls(language, process)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._reader.done()

    async def ask(self, request: Mapping[str, Any]) -> int:
        """Send a request; returns its id."""
        if self._process.stdin is None:
            raise ProgramError("its standard input is not a pipe")
        number, self._next_id = self._next_id, self._next_id + 1
        loop = asyncio.get_running_loop()
        self._answers[number], self._marks[number] = loop.create_future(), loop.create_future()
        self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # told by the reader
            await self._process.stdin.drain()
        if self._reader.done():
            self._give_up()
        return number

    async def answer(self, number: int, seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            ProgramError: none comes in time, or the program has died.
        """
        return await self._wait(self._answers[number], seconds, "answer")

    async def mark(self, number: int, seconds: float) -> dict[str, Any]:
        """The mark of a request; see `answer`.

        Raises:
            ProgramError: none comes in time, or the answer comes first.
        """
        first: set[asyncio.Future[dict[str, Any]]] = {self._marks[number], self._answers[number]}
        await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._marks[number].done() and self._answers[number].done():
            raise ProgramError(f"answered before its mark: {json.dumps(self._answers[number].result())[:300]}")
        return await self._wait(self._marks[number], 0.0, "mark")

    async def end(self) -> None:
        """Close its input and wait for its end; kill it if that takes too long."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise ProgramError("does not end when its input does") from None
        finally:
            await self._reader
        if self._process.returncode:
            raise ProgramError(f"ended with status {self._process.returncode}")

    async def _wait(self, future: asyncio.Future[dict[str, Any]], seconds: float, what: str) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            raise ProgramError(f"no {what} within {seconds:g} s") from None

    async def _read(self) -> None:
        if self._process.stdout is None:
            return
        while line := await self._process.stdout.readline():
            try:
                told = json.loads(line)
            except ValueError:
                continue  # a runtime that greets its user
            known = self._marks if "mark" in told else self._answers
            future = known.get(told.get("id", 0))
            if future is not None and not future.done():
                future.set_result(told)
        self._give_up()

    def _give_up(self) -> None:
        for future in (*self._answers.values(), *self._marks.values()):
            if not future.done():
                future.set_exception(ProgramError("the program has ended"))
                future.exception()  # not everybody waits for it
