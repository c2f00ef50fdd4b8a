"""Plays requests of `clients/conformance` with the Python client: one JSON object per line, in and out."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import mlxstream
from mlxstream.v1.admin_pb2 import DrainRequest, GetLoadRequest
from mlxstream.v1.generation_pb2 import AbortStatus, GenerateResponse

SHOWN = 10_000
LINE_LIMIT_BYTES = 64 * 1024 * 1024
Request = dict[str, Any]
Answer = dict[str, Any]


class Program:
    """Answers requests side by side. Requests with equal servers share one client."""

    def __init__(self) -> None:
        self._clients: dict[str, mlxstream.AsyncClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._actions: dict[str, Callable[[mlxstream.AsyncClient, Request], Coroutine[Any, Any, Answer]]] = {
            "stream": stream,
            "generate": generate,
            "resume": stream,
            "burst": burst,
            "abort": abort,
            "health": health,
            "watch": watch,
            "model": model,
            "load": load,
            "drain": drain,
            "close": self._close,
        }

    async def run(self, lines: AsyncIterator[bytes]) -> None:
        """Begin each line as it comes; when there are no more, finish what was begun."""
        async for line in lines:
            task = asyncio.create_task(self._answer(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)
        for client in self._clients.values():
            await client.close()

    async def _answer(self, request: Request) -> None:
        try:
            answer = await self._actions[request["do"]](self._client(request["server"]), request)
        except mlxstream.MlxStreamError as error:
            answer = {"outcome": "failed", "error": told(error)}
        say({"id": request["id"], **answer})

    async def _close(self, client: mlxstream.AsyncClient, request: Request) -> Answer:
        del self._clients[json.dumps(request["server"], sort_keys=True)]
        await client.close()
        return {"outcome": "ok"}

    def _client(self, server: Request) -> mlxstream.AsyncClient:
        key = json.dumps(server, sort_keys=True)
        if key not in self._clients:
            files = server.get("tls")
            tls = files and mlxstream.Tls.from_files(
                ca=files.get("ca_file"),
                certificate=files.get("certificate_file"),
                key=files.get("key_file"),
                server_name=files.get("server_name"),
            )
            target = server.get("targets") or server["target"]
            self._clients[key] = mlxstream.AsyncClient(target, tls=tls, token=server.get("token"))
        return self._clients[key]


@dataclass
class Seen:
    """What one generation has shown so far."""

    request: Request
    stream: mlxstream.AsyncTextStream
    began: float = field(default_factory=time.perf_counter)
    first_text_seconds: float | None = None
    text: list[str] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    blocks: list[Answer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    sequence: int = 0

    def take(self, event: GenerateResponse) -> None:
        kind = event.WhichOneof("event") or "unknown"
        self.counts[kind] += 1
        self.sequence = event.sequence
        if kind == "chunk":
            if event.chunk.text and self.first_text_seconds is None:
                self.first_text_seconds = time.perf_counter() - self.began
            self.text.append(event.chunk.text)
            self.tokens += event.chunk.tokens
        elif kind == "block":
            block = event.block
            self.blocks.append(
                {"block_index": block.block_index, "revision": block.revision, "committed": block.committed,
                 "tokens": list(block.tokens)}
            )  # fmt: skip

    def has_come(self, moment: Request) -> bool:
        """Whether the moment of `end` is there."""
        if moment["after"] == "started":
            return self.counts["started"] > 0
        return moment["after"] == "chunks" and self.counts["chunk"] >= moment["count"]

    def answer(self, outcome: str, error: mlxstream.MlxStreamError | None = None) -> Answer:
        told_of_tokens: Answer = {}
        if self.request.get("delivery", {}).get("include_token_bytes"):
            told_of_tokens["token_bytes"] = [token.text_bytes.hex() for token in self.tokens]
        if self.request.get("options", {}).get("logprobs"):
            told_of_tokens["logprobs"] = [token.logprobs.logprob for token in self.tokens]
        first = self.tokens[0].index if self.tokens and self.request["do"] == "resume" else 0
        return {
            **generation_told(outcome, "".join(self.text), self.tokens, self.stream, first),
            **told_of_tokens,
            "heartbeats": self.counts["heartbeat"],
            "unknown_events": self.counts["unknown"],
            "blocks": self.blocks,
            "error": error and told(error),
            "seconds": time.perf_counter() - self.began,
            "first_text_seconds": self.first_text_seconds,
        }


async def stream(client: mlxstream.AsyncClient, request: Request) -> Answer:
    seen = Seen(request, opened(client, request))
    end = request.get("end")
    reading = asyncio.create_task(read(seen))
    try:
        if end and end["after"] == "seconds":
            await asyncio.wait({reading}, timeout=end["seconds"])
            end_it(seen, reading, end["by"])
        return await reading
    except asyncio.CancelledError:
        return seen.answer("left")


async def read(seen: Seen) -> Answer:
    """Read to the end, or to where the request says that the stream is to be ended."""
    end, mark = seen.request.get("end"), seen.request.get("mark_after_chunks")
    left = False
    try:
        async for event in seen.stream.events():
            seen.take(event)
            if mark is not None and seen.counts["started"] and seen.counts["chunk"] >= mark:
                mark = None
                say(marked(seen))
            if not left and end and seen.has_come(end):
                left = True
                if end["by"] == "leave":
                    break
                asyncio.get_running_loop().call_soon(end_it, seen, asyncio.current_task(), end["by"])
            await asyncio.sleep(seen.request.get("pause_seconds", 0))
    except mlxstream.MlxStreamError as error:
        return seen.answer("failed", error)
    left = left or seen.stream.finished is None
    return seen.answer("left" if left else "finished")


def end_it(seen: Seen, reading: asyncio.Task[Any] | None, by: str) -> None:
    """End a stream from outside its reader."""
    if by == "owner" and reading is not None:
        reading.cancel()
    else:
        seen.stream.cancel()


def opened(client: mlxstream.AsyncClient, request: Request) -> mlxstream.AsyncTextStream:
    if request["do"] == "resume":
        return client.resume(
            request["generation_id"],
            after_sequence=int(request["after_sequence"]),
            timeout_seconds=request.get("timeout_seconds"),
        )
    return client.stream(*arguments(request), **options(request))


async def generate(client: mlxstream.AsyncClient, request: Request) -> Answer:
    began = time.perf_counter()
    times = {}
    try:
        result = await client.generate(*arguments(request), **options(request))
    except mlxstream.MlxStreamError as error:
        return {"outcome": "failed", "error": told(error), "seconds": time.perf_counter() - began}
    times["seconds"] = time.perf_counter() - began
    return {**generation_told("finished", result.text, result.tokens, result, 0), "error": None, **times}


async def burst(client: mlxstream.AsyncClient, request: Request) -> Answer:
    """Many streams of one request; the answer tells of all of them together."""
    left = iter(range(request["count"]))
    texts: set[str] = set()
    failed: Counter[str] = Counter()
    messages = finished = generated_tokens = 0
    added: list[float] = []
    began = time.perf_counter()

    async def work() -> None:
        nonlocal messages, finished, generated_tokens
        for _ in left:
            seen = Seen(request, client.stream(*arguments(request), **options(request)))
            try:
                async for event in seen.stream.events():
                    seen.take(event)
            except mlxstream.MlxStreamError as error:
                failed[kind_of(error)] += 1
                continue
            finished += 1
            messages += seen.counts.total()
            generated_tokens += seen.stream.usage.generated_tokens
            texts.add("".join(seen.text)[:SHOWN])
            if seen.first_text_seconds is not None and seen.stream.stats is not None:
                added.append(1000 * seen.first_text_seconds - seen.stream.stats.time_to_first_token_ms)

    await asyncio.gather(*(work() for _ in range(request["streams"])))
    added.sort()
    return {
        "outcome": "ok",
        "finished": finished,
        "failed": dict(failed),
        "texts": sorted(texts),
        "messages": messages,
        "generated_tokens": generated_tokens,
        "seconds": time.perf_counter() - began,
        "added_ms": {"p50": at(added, 0.5), "p99": at(added, 0.99)},
    }


async def abort(client: mlxstream.AsyncClient, request: Request) -> Answer:
    answer = await client.abort(request_id=request.get("request_id"), generation_id=request.get("generation_id"))
    return {"outcome": "ok", "status": AbortStatus.Name(answer.status).removeprefix("ABORT_STATUS_")}


async def health(client: mlxstream.AsyncClient, request: Request) -> Answer:
    return {"outcome": "ok", "status": await client.health(request["service"])}


async def watch(client: mlxstream.AsyncClient, request: Request) -> Answer:
    statuses: list[str] = []
    async for status in client.watch_health(request["service"]):
        statuses.append(status)
        if len(statuses) == 1:
            say({"id": request["id"], "mark": "status"})
        if len(statuses) == request["count"]:
            break
    return {"outcome": "ok", "statuses": statuses}


async def model(client: mlxstream.AsyncClient, _request: Request) -> Answer:
    return {"outcome": "ok", "model": (await client.model()).name}


async def load(client: mlxstream.AsyncClient, _request: Request) -> Answer:
    answer = await client.call("AdminService/GetLoad", GetLoadRequest())
    return {"outcome": "ok", "queue_limit": answer.queue_limit}


async def drain(client: mlxstream.AsyncClient, _request: Request) -> Answer:
    answer = await client.call("AdminService/Drain", DrainRequest())
    return {"outcome": "ok", "finished": answer.finished_generations, "aborted": answer.aborted_generations}


def arguments(request: Request) -> tuple[Any]:
    prompt = request["prompt"]
    if "messages" in prompt:
        return (prompt["messages"],)
    if "tokens" in prompt:
        return (prompt["tokens"],)
    return (prompt["text"] + "x" * prompt.get("filler_bytes", 0),)


def options(request: Request) -> Request:
    """Keyword arguments of the client; what the request leaves out stays out."""
    given = dict(request.get("options", {}))
    if "seed" in given:
        given["seed"] = int(given["seed"])
    delivery = dict(request.get("delivery", {}))
    for name, field_name in (("heartbeat_seconds", "heartbeat_interval"), ("max_delay_seconds", "max_delay")):
        if name in delivery:
            delivery[field_name] = delivery.pop(name)
    names = ("model", "request_id", "timeout_seconds")
    return {**given, "delivery": delivery or None, **{name: request[name] for name in names if name in request}}


def generation_told(outcome: str, text: str, tokens: Any, source: Any, first_index: int) -> Answer:
    """The part of an answer that streams and results share; `source` is either."""
    started = source.started
    usage = source.usage
    indices = [token.index for token in tokens]
    return {
        "outcome": outcome,
        "text": text[:SHOWN],
        "text_characters": len(text),
        "tokens": [token.token for token in tokens[:SHOWN]],
        "finish_reason": source.finish_reason and source.finish_reason.value,
        "matched_stop": source.matched_stop,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.generated_tokens,
        },
        "started": started and {
            "model": started.model,
            "seed_was_explicit": started.seed_was_explicit,
            "seed": str(started.options.seed),
            "temperature": started.options.temperature,
            "top_p": started.options.top_p,
            "top_k": started.options.top_k,
            "max_tokens": started.options.max_tokens,
            "resumed_tokens": started.resumed_tokens,
        },
        "in_order": indices == list(range(first_index, first_index + len(indices))),
    }  # fmt: skip


def told(error: mlxstream.MlxStreamError) -> Answer:
    return {
        "kind": kind_of(error),
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "violations": [violation.field for violation in error.violations],
        "metadata": dict(error.metadata),
        "retry_after_seconds": error.retry_after_seconds,
    }


def kind_of(error: mlxstream.MlxStreamError) -> str:
    name = type(error).__name__.removesuffix("Error").removeprefix("Generation")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def marked(seen: Seen) -> Answer:
    started = seen.stream.started
    return {
        "id": seen.request["id"],
        "mark": "chunks",
        "generation_id": started and started.generation_id,
        "sequence": str(seen.sequence),
    }


def at(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def say(told_to_runner: Answer) -> None:
    sys.stdout.write(json.dumps(told_to_runner) + "\n")
    sys.stdout.flush()


async def lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


if __name__ == "__main__":
    asyncio.run(Program().run(lines()))
