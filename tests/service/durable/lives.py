"""A server with durable generations whose words a test lets out one by one, and how to read its streams."""

from __future__ import annotations

import asyncio
from typing import Any

from mlxstream.v1 import generation_pb2
from tests.service.durable.fake_store import FakeStore
from tests.service.fake_engine import FakeEngine, FakeGeneration
from tests.service.harness import Serving, text_request
from tests.waiting import until

WORDS = tuple(f"w{place} " for place in range(12))
EVERYTHING = "".join(WORDS)
DURABLE = {"durable": True, "heartbeat_interval": {"seconds": 1}}

Response = generation_pb2.GenerateResponse


class Words:
    """A script that says `WORDS` one by one, as far as it is let, after what was known before."""

    def __init__(self) -> None:
        self.allowed = 0
        self._changed = asyncio.Event()

    def allow(self, words: int = len(WORDS)) -> None:
        self.allowed = words
        self._changed.set()

    async def __call__(self, generation: FakeGeneration) -> None:
        generation.start(resumed_tokens=len(generation.known))
        if generation.known:
            generation.say(*WORDS[: len(generation.known)])
        while generation.emitted < len(WORDS):
            while generation.emitted >= self.allowed:
                self._changed.clear()
                await self._changed.wait()
            generation.say(WORDS[generation.emitted])
            await asyncio.sleep(0)
        generation.end()


class Life:
    """A server over a store that outlives it."""

    def __init__(self, serving: Serving, words: Words) -> None:
        self.serving = serving
        self.words = words

    @property
    def generations(self) -> list[FakeGeneration]:
        return self.serving.engine.generations

    def ask(self, **fields: Any) -> Any:
        request = text_request(**{"delivery": DURABLE, **fields})
        return self.serving.generation.Generate(request)

    def resume(self, generation_id: str, after_sequence: int = 0) -> Any:
        request = generation_pb2.ResumeRequest(generation_id=generation_id, after_sequence=after_sequence)
        return self.serving.generation.Resume(request)

    async def until(self, condition: Any) -> None:
        await until(condition)


def engine_of(store: FakeStore, words: Words) -> FakeEngine:
    engine = FakeEngine(durable_store=store)
    engine.script = words
    return engine


async def some(call: Any, tokens: int) -> list[Response]:
    """Responses, Started included, until so many tokens have come."""
    responses: list[Response] = []
    while len(words_of(responses)) < tokens or not responses:
        responses.append(await call.read())
    return responses


def words_of(responses: list[Response]) -> list[int]:
    return [token.index for response in responses for token in response.chunk.tokens]


def text_of(responses: list[Response]) -> str:
    return "".join(response.chunk.text for response in responses)


def kinds(responses: list[Response]) -> list[str]:
    return [str(response.WhichOneof("event")) for response in responses]


def assert_grammar(responses: list[Response], after_sequence: int = 0) -> None:
    first = max(1, after_sequence)
    assert [one.sequence for one in responses] == [first + place for place in range(len(responses))]
    assert kinds(responses)[0] == "started"
    assert "started" not in kinds(responses)[1:]
    assert kinds(responses)[-1] == "finished"


async def left_after(life: Life, tokens: int, **fields: Any) -> tuple[str, list[Response]]:
    """A stream whose connection ends after so many tokens; the generation stays."""
    life.words.allow(tokens)
    call = life.ask(**fields)
    responses = await some(call, tokens)
    call.cancel()
    (generation,) = life.serving.durable.here
    await life.until(lambda: not generation.is_read)
    return responses[0].started.generation_id, responses
