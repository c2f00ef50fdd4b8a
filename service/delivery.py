"""How one generation's tokens are packed into messages. Pure: clocks are arguments, in seconds.

A piece of text travels with the last of the tokens that made it final, so it never runs ahead of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.contracts.events import TokensGenerated

if TYPE_CHECKING:
    from engine.contracts.results import GeneratedToken

# Keeps what piled up for a slow reader within the 4 MiB that clients receive by default, log-probabilities included,
# and so far below the 64 MiB that our own clients receive.
MESSAGE_TOKENS_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Resolved DeliveryOptions. `heartbeat_seconds` None means no heartbeats."""

    include_text: bool = True
    include_token_bytes: bool = False
    include_cache_tokens: bool = False
    max_tokens_per_message: int = MESSAGE_TOKENS_LIMIT
    max_delay_seconds: float = 0.0
    heartbeat_seconds: float | None = None
    partial_at_deadline: bool = False
    durable: bool = False


class ChunkBuffer:
    """Tokens and text that wait to be sent, oldest first."""

    def __init__(self, *, max_tokens: int, max_delay_seconds: float) -> None:
        """A message holds at most `max_tokens`; a token waits at most `max_delay_seconds`."""
        self._max_tokens = max_tokens
        self._max_delay_seconds = max_delay_seconds
        self._pieces: deque[tuple[GeneratedToken | None, str]] = deque()
        self._tokens = 0
        self._due_at: float | None = None

    @property
    def due_at(self) -> float | None:
        """When the oldest piece must be sent; None while nothing waits."""
        return self._due_at

    def add(self, event: TokensGenerated, now: float) -> None:
        """Append what `event` brings."""
        if not event.tokens and not event.text:
            return
        *earlier, last = event.tokens or (None,)
        self._pieces.extend((token, "") for token in earlier)
        self._pieces.append((last, event.text))
        self._tokens += len(event.tokens)
        if self._due_at is None:
            self._due_at = now + self._max_delay_seconds

    def take(self, now: float, *, everything: bool = False) -> list[TokensGenerated]:
        """Remove and return the messages to send now: full ones, and the rest once it is due."""
        due = everything or (self._due_at is not None and now >= self._due_at)
        messages = []
        while self._pieces and (due or self._tokens >= self._max_tokens):
            messages.append(self._take_message())
        if messages:
            self._due_at = now + self._max_delay_seconds if self._pieces else None
        return messages

    def _take_message(self) -> TokensGenerated:
        tokens: list[GeneratedToken] = []
        text: list[str] = []
        while self._pieces:
            token, piece = self._pieces[0]
            if token is not None:
                if len(tokens) == self._max_tokens:
                    break
                tokens.append(token)
            text.append(piece)
            self._pieces.popleft()
        self._tokens -= len(tokens)
        return TokensGenerated(tuple(tokens), "".join(text))
