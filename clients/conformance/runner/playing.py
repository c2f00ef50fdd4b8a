"""Plays one case with one program: its steps in their order, and every expectation on the way.

A step is an object with one of these keys: `send` (a request, called `as`), `mark` and `answer` (wait for what was
sent; `expect` says what an answer must be), `ask` (`send` and `answer` in one), `account` (what the server's log must
say of the end of a request), `attempts` (how often the server must have seen one), `server` (`kill` it, `restart` it,
`stop`: ask it to end, `end`: and wait until it has, `forget`: lose the end of its durable logs), `load` (wait until
the server says this of its load), `network` (`cut`), `program` (`end`: close its input, and wait until it has ended),
`pause_seconds`, `served` (`ask` until every server has had `at_least` so many), `agree` (an abort and the stream that
it met must tell one story), and `example` (the client's example of that name, run to its end).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clients.conformance.runner.expecting import differences
from clients.conformance.runner.programs import Program, ProgramError
from clients.conformance.runner.servers import LOOK_SECONDS, ServerError

if TYPE_CHECKING:
    from clients.conformance.runner.proxy import Proxy
    from clients.conformance.runner.servers import Server
    from clients.conformance.runner.stage import Stage

ANSWER_SECONDS = 60.0
FREED_SECONDS = 4.0


class Play:
    """One case being played. `answers` are what the program reported, by the names of its requests."""

    def __init__(self, case: Mapping[str, Any], program: Program, stage: Stage) -> None:
        self._case = case
        self._program = program
        self._stage = stage
        self._sent: dict[str, tuple[int, str]] = {}
        self._marks: dict[str, dict[str, Any]] = {}
        self._servers: list[Server] = []
        self._proxy: Proxy | None = None
        self._own_program: Program | None = None
        self.answers: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []

    async def run(self) -> None:
        """Play all steps; `failures` says afterwards what was not as it should be."""
        try:
            await self._set_up()
            for step in self._case["steps"]:
                await self._step(step)
        except (ProgramError, ServerError) as error:
            self.failures.append(str(error))
        finally:
            await self._tear_down()

    async def _set_up(self) -> None:
        name, own = self._case.get("server", "plain"), bool(self._case.get("own_server"))
        if name != "canned":
            for _ in range(self._case.get("servers", 1)):
                self._servers.append(await self._stage.server(name, own=own))
        if self._case.get("network"):
            self._proxy = await self._stage.proxy(self._servers[0])
        if self._case.get("own_program"):
            self._program = self._own_program = await self._stage.program(self._program.language)

    async def _tear_down(self) -> None:
        if self._own_program is not None and not self._own_program.has_ended:
            try:
                await self._own_program.end()
            except ProgramError as error:
                self.failures.append(str(error))
        if self._proxy is not None:
            await self._proxy.stop()
        if self._case.get("own_server"):
            for server in self._servers:
                await server.stop()

    async def _step(self, step: Mapping[str, Any]) -> None:
        actions = {
            "ask": self._ask,
            "send": self._send_step,
            "mark": self._await_mark,
            "answer": self._await_answer,
            "account": self._account,
            "attempts": self._attempts,
            "server": self._change_server,
            "network": self._cut_network,
            "program": self._end_program,
            "pause_seconds": self._pause,
            "load": self._await_load,
            "served": self._each_has_served,
            "agree": self._agree,
            "example": self._run_example,
        }
        name = next((key for key in step if key in actions), None)
        if name is None:
            raise ProgramError(f"no such step: {step}")
        await actions[name](step)

    async def _ask(self, step: Mapping[str, Any]) -> None:
        name = step.get("as", "it")
        await self._send(name, step["ask"])
        await self._answer(name, step.get("expect", {}))

    async def _send_step(self, step: Mapping[str, Any]) -> None:
        await self._send(step["as"], step["send"])

    async def _await_mark(self, step: Mapping[str, Any]) -> None:
        name = step["mark"]
        self._marks[name] = await self._program.mark(self._sent[name][0], ANSWER_SECONDS)

    async def _await_answer(self, step: Mapping[str, Any]) -> None:
        await self._answer(step["answer"], step.get("expect", {}))

    async def _pause(self, step: Mapping[str, Any]) -> None:
        await asyncio.sleep(step["pause_seconds"])

    async def _change_server(self, step: Mapping[str, Any]) -> None:
        server = self._servers[0]
        match step["server"]:
            case "kill":
                await server.kill()
            case "restart":
                await server.start()
            case "stop":
                server.ask_to_stop()
            case "end":
                await server.stop()
            case "forget":
                server.forget()
            case other:
                raise ProgramError(f"a server cannot {other}")

    async def _cut_network(self, _step: Mapping[str, Any]) -> None:
        if self._proxy is None:
            raise ProgramError("the case has no network to cut")
        await self._proxy.cut()

    async def _end_program(self, _step: Mapping[str, Any]) -> None:
        if self._own_program is None:
            raise ProgramError("the case has no program of its own to end")
        await self._own_program.end()

    async def _send(self, name: str, request: Mapping[str, Any]) -> None:
        filled = self._resolved(self._stage.filled(request))
        if request["do"] in ("stream", "generate"):
            filled.setdefault("request_id", f"{name}-{uuid.uuid4().hex[:12]}".replace(" ", "-"))
        filled["server"] = filled.get("server") or await self._connection()
        self._sent[name] = await self._program.ask(filled), filled.get("request_id", "")

    async def _connection(self) -> dict[str, Any]:
        name = self._case.get("server", "plain")
        if name == "canned":
            return {"target": (await self._stage.canned()).target}
        if self._case.get("balanced"):
            return {"targets": [server.target for server in self._servers]}
        target = self._proxy.target if self._proxy is not None else self._servers[0].target
        return self._stage.connection(name, target)

    def _resolved(self, request: Any) -> Any:
        """`request` with `{"$of": NAME, "$take": KEY}` replaced by what the mark or the request of that name says."""
        if isinstance(request, list):
            return [self._resolved(item) for item in request]
        if not isinstance(request, Mapping):
            return request
        if "$of" in request:
            if request["$take"] == "request_id":
                return self._sent[request["$of"]][1]
            return self._marks[request["$of"]][request["$take"]]
        return {key: self._resolved(value) for key, value in request.items()}

    async def _answer(self, name: str, expected: Mapping[str, Any]) -> None:
        answer = await self._program.answer(self._sent[name][0], ANSWER_SECONDS)
        self.answers[name] = answer
        self._judge(name, expected, answer)

    async def _account(self, step: Mapping[str, Any]) -> None:
        name = step["account"]
        found = await self._servers[0].account(self._sent[name][1], FREED_SECONDS)
        if found is None:
            self.failures.append(f"{name}: the server still runs it {FREED_SECONDS:g} s later")
            return
        self._judge(f"server's account of {name}", step["expect"], {key: _value(text) for key, text in found.items()})

    async def _attempts(self, step: Mapping[str, Any]) -> None:
        name = step["attempts"]
        lines = self._servers[0].lines("scripted attempt")
        found = sum(line.get("request_id") == self._sent[name][1] for line in lines)
        if found != step["expect"]:
            self.failures.append(f"{name}: the server saw {found} attempts, not {step['expect']}")

    async def _await_load(self, step: Mapping[str, Any]) -> None:
        latest = time.monotonic() + ANSWER_SECONDS
        while failures := differences(step["load"], await self._servers[0].load(), "load"):
            if time.monotonic() >= latest:
                self.failures += failures
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _each_has_served(self, step: Mapping[str, Any]) -> None:
        """A client may balance over the servers that it has reached so far: it gets time to reach the others."""
        latest = time.monotonic() + ANSWER_SECONDS
        while not self.failures:
            await self._ask(step)
            served = [len(server.lines("generation finished")) for server in self._servers]
            if min(served) >= step["at_least"]:
                return
            if time.monotonic() >= latest:
                self.failures.append(f"the servers have served {served} generations")

    async def _agree(self, step: Mapping[str, Any]) -> None:
        aborting, stream = step["agree"]
        status, outcome = self.answers[aborting].get("status"), self.answers[stream]
        was_aborted = outcome.get("outcome") == "failed" and (outcome.get("error") or {}).get("kind") == "cancelled"
        ran = outcome.get("outcome") == "finished"
        if not ((status == "ABORTED" and was_aborted) or (status == "NOT_RUNNING" and ran)):
            self.failures.append(f"the abort says {status}, and the stream {outcome.get('outcome')}")

    async def _run_example(self, step: Mapping[str, Any]) -> None:
        name = step["example"]
        told = await self._stage.example(self._program.language, name, self._servers[0].target)
        self._judge(f"example {name}", step["expect"], told)
        if told["status"]:
            self.failures.append(f"example {name} said at last: {told['output'][-300:]}")

    def _judge(self, name: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.failures += differences(self._stage.filled(expected), found, name)


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
