"""What a generation yields: tokens, their log-probabilities, the finish reason and the statistics.

Times are wall milliseconds, rates tokens per second, log-probabilities natural logarithms.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

LEAST_LOGPROB: Final = -9999.0
"""What a smaller log-probability is reported as, that of an impossible token too."""


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class AbortReason(enum.Enum):
    """What ended a generation before its own end."""

    REQUESTED = "requested"
    DISCONNECTED = "disconnected"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One candidate of a position: its token id and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from `LEAST_LOGPROB` to 0.

    `top` is sorted from the most likely down; where it is not empty, the chosen token is in it, or follows it.
    """

    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen and not committed yet."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One committed token. `index` counts from 0 over the completion; EOS is never yielded."""

    token: int
    index: int
    text_bytes: bytes = b""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingStats:
    """What block diffusion has done: passes over all blocks, blocks finished, and the positions of their canvases."""

    steps: int = 0
    blocks: int = 0
    canvas_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateStats:
    """Account of one generation, given on every end.

    `generated_tokens` includes a terminating EOS; `prefill_ms` includes the read-back of token zero.
    A rate whose denominator is zero is 0. Source: reference, autoregressive §1.2.
    With `denoising`, `generated_tokens` counts delivered tokens alone, `decode_ms` runs from admission to the end, and
    what tells of prefill and cache is empty. Source: reference, denoising-and-models §3.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    queue_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    cache_tokens: tuple[int, ...] = ()
    denoising: DenoisingStats | None = None


def tokens_per_second(tokens: int, milliseconds: float) -> float:
    """Rate of `tokens` over `milliseconds`; 0 when no time has passed."""
    return 1000.0 * tokens / milliseconds if milliseconds > 0 else 0.0
