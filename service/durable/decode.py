"""Results from their messages: what a token log holds, in the engine's terms again. Pure; the mirror of `encode`."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.contracts.events import GenerationFinished
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats, TokenLogprobs, TopLogprob
from mlxstream.v1 import result_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlxstream.v1 import event_pb2

# The ends that a generation comes to by itself; no others are kept.
_OWN_ENDS: Final = MappingProxyType(
    {result_pb2.FINISH_REASON_STOP: FinishReason.STOP, result_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
)


def decode_tokens(tokens: Iterable[result_pb2.GeneratedToken]) -> tuple[GeneratedToken, ...]:
    """Tokens."""
    return tuple(
        GeneratedToken(
            token=one.token,
            index=one.index,
            text_bytes=one.text_bytes,
            logprobs=_logprobs(one.logprobs) if one.HasField("logprobs") else None,
        )
        for one in tokens
    )


def decode_finished(finished: event_pb2.Finished) -> GenerationFinished:
    """The own end of a generation.

    Raises:
        ValueError: it is an end of another kind.
    """
    if finished.finish_reason not in _OWN_ENDS:
        raise ValueError("no end that a generation comes to by itself")
    return GenerationFinished(
        finish_reason=_OWN_ENDS[finished.finish_reason],
        stats=_stats(finished.stats),
        matched_stop=finished.matched_stop,
    )


def _stats(stats: result_pb2.GenerateStats) -> GenerateStats:
    """The account of an autoregressive generation; no others are durable."""
    names = {field.name for field in dataclasses.fields(GenerateStats)} - {"denoising"}
    values = {name: getattr(stats, name) for name in names}
    return GenerateStats(**values | {"cache_tokens": tuple(stats.cache_tokens)})


def _logprobs(logprobs: result_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=logprobs.logprob if logprobs.HasField("logprob") else None,
        top=tuple(TopLogprob(token=one.token, logprob=one.logprob) for one in logprobs.top),
    )
