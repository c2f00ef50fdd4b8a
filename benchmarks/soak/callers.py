"""The callers of a soak: each does one thing after the other, as callers do, and keeps count of how it ended.

Whoever gets tokens holds them against what the same request gave on the quiet server.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from mlxstream.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

SEEDS = 12
# How callers behave, and how often each way is taken.
WEIGHTS = {
    "whole": 6, "unary": 2, "cancel": 3, "cancel_at_once": 2, "deadline": 2, "partial": 1, "disconnect": 2, "slow": 1,
    "abort": 1, "bad": 1, "text": 1, "reconnect": 2,
}  # fmt: skip
EXPECTED = {
    grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    ways: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)


def request(seed: int, *, prompt_tokens: int, max_tokens: int, vocabulary: int) -> generation_pb2.GenerateRequest:
    """The request of one seed: a prompt of its own, greedy or sampled."""
    numbers = random.Random(seed)
    ids = [numbers.randrange(vocabulary) for _ in range(1 + prompt_tokens * (1 + seed % 4) // 4)]
    options = {"max_tokens": max_tokens, "eos_token_ids": {"ids": []}, "seed": seed}
    if seed % 2:
        options["temperature"] = 0.8
    return generation_pb2.GenerateRequest(tokens={"ids": ids}, options=options)


class Callers:
    """Callers of one server, who stop when they are told to."""

    def __init__(self, target: str, *, prompt_tokens: int, max_tokens: int, vocabulary: int) -> None:
        self.tally = Tally()
        self.ending = False
        self._target = target
        self._sizes = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "vocabulary": vocabulary}
        self._wanted: dict[int, list[int]] = {}
        self._ways: dict[str, Callable[[grpc.aio.Channel, int, random.Random], Awaitable[None]]] = {
            name: getattr(self, f"_{name}") for name in WEIGHTS
        }

    async def learn(self) -> None:
        """Ask everything once on the quiet server."""
        async with self._channel() as channel:
            for seed in range(SEEDS):
                self._wanted[seed] = await self._read(self._stream(channel, seed))

    async def run(self, number: int) -> None:
        """Be one caller."""
        choice = random.Random(number)
        channel, calls = self._channel(), 0
        while not self.ending:
            way = choice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self.tally.ways[way] += 1
            try:
                await self._ways[way](channel, choice.randrange(SEEDS), choice)
                self.tally.ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.tally.ends[error.code().name] += 1
                if error.code() not in EXPECTED:
                    self.tally.surprises.append(f"{way}: {error.code().name}: {error.details()}")
            except asyncio.CancelledError:
                self.tally.ends["CANCELLED"] += 1
            calls += 1
            if way == "disconnect" or calls % 50 == 0:
                await channel.close()
                channel = self._channel()
        await channel.close()

    def _channel(self) -> grpc.aio.Channel:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        return grpc.aio.insecure_channel(self._target, options=options)

    def _stream(self, channel: grpc.aio.Channel, seed: int, **call: object) -> grpc.aio.UnaryStreamCall:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return stub.Generate(request(seed, **self._sizes), **call)

    async def _read(self, call: AsyncIterable[generation_pb2.GenerateResponse], most: int | None = None) -> list[int]:
        ids: list[int] = []
        async for response in call:
            for token in response.chunk.tokens:
                if token.index != len(ids):
                    self.tally.wrong.append(f"index {token.index} came where {len(ids)} was due")
                ids.append(token.token)
            if most is not None and len(ids) >= most:
                break
        self.tally.tokens += len(ids)
        return ids

    def _compare(self, seed: int, ids: list[int], *, whole: bool) -> None:
        wanted = self._wanted[seed] if whole else self._wanted[seed][: len(ids)]
        if ids != wanted:
            self.tally.wrong.append(f"seed {seed}: {len(ids)} tokens differ from the quiet server's")

    async def _whole(self, channel: grpc.aio.Channel, seed: int, _choice: random.Random) -> None:
        self._compare(seed, await self._read(self._stream(channel, seed)), whole=True)

    async def _unary(self, channel: grpc.aio.Channel, seed: int, _choice: random.Random) -> None:
        asked = request(seed, **self._sizes)
        complete = generation_pb2.CompleteRequest(tokens=asked.tokens, options=asked.options)
        answer = await generation_pb2_grpc.GenerationServiceStub(channel).Complete(complete)
        self.tally.tokens += len(answer.tokens)
        self._compare(seed, [token.token for token in answer.tokens], whole=True)

    async def _cancel(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        call = self._stream(channel, seed)
        self._compare(seed, await self._read(call, choice.randrange(1, 10)), whole=False)
        call.cancel()

    async def _cancel_at_once(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        call = self._stream(channel, seed)
        await asyncio.sleep(choice.random() * 0.02)
        call.cancel()

    async def _deadline(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        await self._read(self._stream(channel, seed, timeout=0.01 + choice.random() * 0.3))

    async def _partial(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        asked = request(seed, **self._sizes)
        asked.delivery.deadline_policy = 2
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._compare(seed, await self._read(stub.Generate(asked, timeout=0.3 + choice.random())), whole=False)

    async def _disconnect(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        call = self._stream(channel, seed)
        await self._read(call, choice.randrange(1, 5))
        await channel.close()

    async def _reconnect(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        asked = request(seed, **self._sizes)
        asked.delivery.durable = True
        ids: list[int] = []
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked)
        point = await self._read_on(call, ids, choice.randrange(1, 10))
        call.cancel()
        async with self._channel() as another:
            await self._read_on(generation_pb2_grpc.GenerationServiceStub(another).Resume(point), ids)
        self._compare(seed, ids, whole=True)

    async def _read_on(
        self, call: AsyncIterable[generation_pb2.GenerateResponse], ids: list[int], most: int | None = None
    ) -> generation_pb2.ResumeRequest:
        """Add what comes to `ids`, until there are `most` or the end has come; returns where to go on."""
        point, before = generation_pb2.ResumeRequest(), len(ids)
        async for response in call:
            point.after_sequence = response.sequence
            if response.HasField("started"):
                point.generation_id = response.started.generation_id
            ids += [token.token for token in response.chunk.tokens]
            if most is not None and len(ids) >= most:
                break
        self.tally.tokens += len(ids) - before
        return point

    async def _slow(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        call, ids = self._stream(channel, seed), []
        async for response in call:
            ids += [token.token for token in response.chunk.tokens]
            await asyncio.sleep(choice.random() * 0.05)
        self.tally.tokens += len(ids)
        self._compare(seed, ids, whole=True)

    async def _abort(self, channel: grpc.aio.Channel, seed: int, choice: random.Random) -> None:
        responses = aiter(self._stream(channel, seed))
        started = await anext(responses)
        await asyncio.sleep(choice.random() * 0.05)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await stub.Abort(generation_pb2.AbortRequest(generation_id=started.started.generation_id))
        self._compare(seed, await self._read(responses), whole=False)

    async def _bad(self, channel: grpc.aio.Channel, seed: int, _choice: random.Random) -> None:
        asked = request(seed, **self._sizes)
        asked.tokens.ids.append(self._sizes["vocabulary"])
        await self._read(generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked))

    async def _text(self, channel: grpc.aio.Channel, seed: int, _choice: random.Random) -> None:
        models = model_pb2_grpc.ModelServiceStub(channel)
        ids = (await models.Tokenize(model_pb2.TokenizeRequest(text=f"text number {seed}"))).ids
        text = (await models.Detokenize(model_pb2.DetokenizeRequest(ids=ids))).text
        if text.strip() != f"text number {seed}":
            self.tally.wrong.append(f"a text came back as {text!r}")
