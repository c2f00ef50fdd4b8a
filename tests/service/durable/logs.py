"""Token logs for tests: a header, and events as the engine tells them."""

from __future__ import annotations

from engine.contracts.durability import DurableIdentity
from engine.contracts.events import GenerationFinished, TokensGenerated
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats, TokenLogprobs, TopLogprob
from mlxstream.v1 import event_pb2, generation_pb2
from service.durable.header import LogHeader
from service.durable.token_log import TokenLog

GENERATION_ID = "0123456789abcdef" * 2
IDENTITY = DurableIdentity(model="tiny", weights="w", tokenizer="t", kv_storage="bf16", adapters="", arithmetic="a")


def header(generation_id: str = GENERATION_ID, **changes: object) -> LogHeader:
    request = generation_pb2.GenerateRequest(tokens={"ids": [1, 2, 3]}, delivery={"durable": True})
    values = {
        "generation_id": generation_id,
        "request_id": "mine",
        "caller": "",
        "key": "ab" * 32,
        "seed": 2**64 - 1,
        "seed_was_explicit": False,
        "priority": -3,
        "identity": IDENTITY,
        "request": request.SerializeToString(),
    }
    return LogHeader(**values | changes)


def said(first: int, *texts: str) -> TokensGenerated:
    """One token for each text, whose id is 100 more than its place."""
    tokens = tuple(
        GeneratedToken(100 + index, index, text.encode(), TokenLogprobs(-0.5, (TopLogprob(100 + index, -0.5),)))
        for index, text in enumerate(texts, start=first)
    )
    return TokensGenerated(tokens, "".join(texts))


def ended(reason: FinishReason = FinishReason.STOP, **more: object) -> GenerationFinished:
    stats = GenerateStats(prompt_tokens=3, generated_tokens=2, decode_ms=1.5, cache_tokens=(1, 2, 3, 100))
    return GenerationFinished(finish_reason=reason, stats=stats, matched_stop="END", **more)


def started() -> event_pb2.Started:
    return event_pb2.Started(generation_id=GENERATION_ID, request_id="mine", prompt_tokens=3)


def ids(log: TokenLog) -> list[int]:
    return [token.token for token in log.tokens]
