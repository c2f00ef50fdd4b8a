"""Durable generations on the real engine: requests of every kind, and lives of servers over one state folder."""

import contextlib
from dataclasses import dataclass, replace

from mlxstream import AsyncClient
from tests.engine.execution.holding import held_after
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import until
from tests.whole.conftest import serving

LENGTH = 90
REQUESTS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "penalised": {
        "temperature": 0.8,
        "seed": 8,
        "repetition_penalty": 1.2,
        "repetition_context_size": 0,
        "frequency_penalty": 0.4,
        "frequency_context_size": 0,
    },
    "xtc": {"temperature": 1.0, "seed": 9, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "logprobs": {"temperature": 1.0, "seed": 10, "logprobs": True, "top_logprobs": 3},
}


def asked(kind, **changes):
    """A request whose ids are of that kind; it is long enough to be cut several times."""
    return {
        "prompt": random_prompt(3, 40),
        "max_tokens": LENGTH,
        "eos_token_ids": [],
        "checkpoint_every_tokens": 16,
        **REQUESTS[kind],
        **changes,
    }


def ordinary(request):
    """The same request without durability."""
    return {name: value for name, value in request.items() if name != "checkpoint_every_tokens"}


@dataclass
class Seen:
    """What came of a stream, and where it stood."""

    generation_id: str
    tokens: list
    text: str
    sequence: int
    resumed_tokens: int
    finish_reason: object

    @property
    def ids(self):
        return [token.token for token in self.tokens]

    def then(self, other):
        """Both, one after the other; nothing may be missing or come twice."""
        tokens = self.tokens + other.tokens
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return replace(other, generation_id=self.generation_id, tokens=tokens, text=self.text + other.text)


async def read(stream, tokens=None):
    """Read a stream to its end, or until it has brought so many tokens; it is left open then."""
    seen = Seen("", [], "", 0, 0, None)
    async for response in stream.events():
        seen.sequence = response.sequence
        if response.WhichOneof("event") == "started":
            seen.generation_id = response.started.generation_id
            seen.resumed_tokens = response.started.resumed_tokens
        seen.tokens += response.chunk.tokens
        seen.text += response.chunk.text
        if tokens is not None and len(seen.tokens) >= tokens:
            break
    seen.finish_reason = stream.finish_reason
    return seen


@contextlib.asynccontextmanager
async def life(folder, state_dir, **settings):
    """A server from its start to its end, and a client."""
    async with (
        serving(folder, state_dir, **settings) as whole,
        AsyncClient(str(whole.address), timeout_seconds=60) as client,
    ):
        yield whole, client


async def begun(folder, state_dir, request, tokens, *, once=lambda: True, **settings):
    """A server that ends when a stream has brought so many tokens, and `once` holds: what it had brought.

    The row comes to a stand a little later, so that the machine's pace decides nothing.
    """
    with held_after(tokens + 2):
        async with life(folder, state_dir, **settings) as (_, client):
            seen = await read(raw_stream(client, request), tokens)
            await until(once)
            return seen


def raw_stream(client, request):
    """A durable stream that does not resume by itself, and whose loss ends nothing."""
    arguments = {**request, "delivery": {"durable": True, "max_tokens_per_message": 5}}
    stream = client.stream(arguments.pop("prompt"), **arguments)
    stream._reader.cancel = lambda: None
    return stream
