"""What the batch, and the keeper of prefixes, see of a row. Rows of every method look alike from here.

What a stepper reads for a row, only that row understands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from engine.contracts.cache import Cache
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.errors import EngineError
    from engine.contracts.events import GenerationEvent, GenerationFinished
    from engine.contracts.options import ResolvedOptions
    from engine.contracts.results import FinishReason


class KeptRow(Protocol):
    """What the keeper sees of a row."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of the prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that it began with."""

    @property
    def position(self) -> int:
        """Tokens that its state holds."""

    @property
    def state_tokens(self) -> tuple[int, ...]:
        """Ids whose state is written."""

    @property
    def next_index(self) -> int:
        """Completion index of its next token."""

    @property
    def caches(self) -> list[Cache]:
        """Its state, as far as it is of use to other rows."""


class JobRow(KeptRow, Protocol):
    """One generation between admission and its end, whatever its method. Units: tokens, and units of work."""

    @property
    def options(self) -> ResolvedOptions:
        """What runs."""

    @property
    def signal(self) -> AbortSignal:
        """Its abort signal."""

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens remain to be fed."""

    @property
    def unfed_tokens(self) -> int:
        """Known tokens that remain to be fed."""

    def next_width(self, limit_tokens: int) -> int:
        """Tokens of the next unit when `limit_tokens` may be spent; an exact one may pass the limit."""

    def limit_next_unit(self, tokens: int) -> None:
        """Let the next unit be no wider than `tokens`, unless it is exact."""

    def admit(self, caches: list[Cache], cached_tokens: int = 0, *, joins_tail: bool = True) -> None:
        """Take caches that hold the first `cached_tokens` of the prompt.

        `joins_tail` lets the prompt's last token share a step with what comes before it.
        """

    def restart(self, caches: list[Cache]) -> None:
        """Begin anew with fresh `caches`, and lose nothing that was said."""

    def receive(self, drawn: Any) -> tuple[list[GenerationEvent], GenerationFinished | None]:
        """Take what a step brought; returns what the caller hears, and the end if there is one."""

    def aborted(self) -> tuple[str, GenerationFinished]:
        """End after the abort signal: the text that was held back, and the end."""

    def finished(self, reason: FinishReason, *, error: EngineError | None = None) -> GenerationFinished:
        """The end, with the statistics as they stand."""

    def close(self) -> None:
        """Release what is held."""
