"""What a generation gives beside its text: why it ended, what it used, and all of it at once."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mlxstream.v1.event_pb2 import Finished, Started
from mlxstream.v1.result_pb2 import FinishReason as FinishReasonValue
from mlxstream.v1.result_pb2 import GeneratedToken, GenerateStats

_PREFIX = "FINISH_REASON_"
_SHOWN_CHARACTERS = 60


class FinishReason(enum.StrEnum):
    """Why a generation ended. A value that this client does not know counts as unspecified."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"

    @classmethod
    def of(cls, finished: Finished) -> FinishReason:
        """The reason in the last event of a stream."""
        by_value = {FinishReasonValue.Value(_PREFIX + reason.name): reason for reason in cls}
        return by_value.get(finished.finish_reason, cls.UNSPECIFIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a generation has used so far. Units: tokens. `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Generation:
    """A finished generation. `started` and `stats` are the schema's own messages."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: FinishReason
    matched_stop: str
    stats: GenerateStats
    started: Started

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN_CHARACTERS else self.text[: _SHOWN_CHARACTERS - 1] + "…"
        used = f"prompt_tokens={self.stats.prompt_tokens}, generated_tokens={self.stats.generated_tokens}"
        return f"Generation({shown!r}, finish_reason={self.finish_reason.value!r}, {used})"

    @property
    def usage(self) -> Usage:
        """The tokens used."""
        return Usage(
            prompt_tokens=self.stats.prompt_tokens,
            cached_tokens=self.stats.cached_tokens,
            generated_tokens=self.stats.generated_tokens,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the generated tokens, without a terminating end token."""
        return tuple(token.token for token in self.tokens)
