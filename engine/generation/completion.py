"""What one generation has said, and how it ends, whatever its method: end tokens, stop rule, limit, abort. No clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.errors import GenerationAborted, UnavailableError
from engine.contracts.events import GenerationFinished
from engine.contracts.results import AbortReason, FinishReason, GeneratedToken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.errors import EngineError
    from engine.contracts.options import ResolvedOptions
    from engine.contracts.results import GenerateStats, TokenLogprobs
    from engine.generation.text import TextAssembler


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a generation ends; `matched_stop` names the stop sequence that was met."""

    finish_reason: FinishReason
    matched_stop: str = ""
    error: EngineError | None = None

    def with_stats(self, stats: GenerateStats) -> GenerationFinished:
        """What the caller hears last."""
        return GenerationFinished(
            finish_reason=self.finish_reason, stats=stats, matched_stop=self.matched_stop, error=self.error
        )


class Completion:
    """The tokens that one row has committed, and their text.

    Attributes:
        tokens: committed ids in order; an end token is the last of them.
    """

    __slots__ = ("_eos_token_ids", "_max_tokens", "_text", "tokens")

    def __init__(self, options: ResolvedOptions, text: TextAssembler) -> None:
        """Take the row's own detokenizer and stop rule."""
        self.tokens: list[int] = []
        self._eos_token_ids = options.eos_token_ids
        self._max_tokens = options.max_tokens
        self._text = text

    def commit(
        self, token: int, logprobs: TokenLogprobs | None = None
    ) -> tuple[GeneratedToken | None, str, Ending | None]:
        """Take a token; returns it if it is shown, the text that became final, and the end if any."""
        index = len(self.tokens)
        self.tokens.append(token)
        if token in self._eos_token_ids:
            return None, *self._ended(FinishReason.STOP)
        pushed = self._text.push(token)
        shown = GeneratedToken(token=token, index=index, text_bytes=pushed.token_bytes, logprobs=logprobs)
        if pushed.matched_stop is not None:
            return shown, pushed.text, Ending(finish_reason=FinishReason.STOP, matched_stop=pushed.matched_stop)
        if len(self.tokens) >= self._max_tokens:
            text, ending = self._ended(FinishReason.LENGTH)
            return shown, pushed.text + text, ending
        return shown, pushed.text, None

    def commit_all(self, tokens: Iterable[int]) -> tuple[list[GeneratedToken], str, Ending | None]:
        """Take tokens until one brings the end; returns those that are shown, their text, and the end if any."""
        shown, pieces, ending = [], [], None
        for token in tokens:
            one, text, ending = self.commit(token)
            shown += [] if one is None else [one]
            pieces.append(text)
            if ending is not None:
                break
        return shown, "".join(pieces), ending

    def aborted(self, signal: AbortSignal) -> tuple[str, Ending]:
        """End after `signal` was raised: the text that was held back, and what the caller is told."""
        return self._text.finish(), _abort_ending(signal.reason or AbortReason.REQUESTED)

    def _ended(self, reason: FinishReason) -> tuple[str, Ending]:
        """The held text and the end; a stop sequence that only the held text completes is a stop all the same."""
        text, matched = self._text.finish(), self._text.matched_stop
        if matched is None:
            return text, Ending(finish_reason=reason)
        return text, Ending(finish_reason=FinishReason.STOP, matched_stop=matched)


def _abort_ending(reason: AbortReason) -> Ending:
    if reason is AbortReason.SHUTDOWN:
        error: EngineError = UnavailableError("stopped", "the service is shutting down")
        return Ending(finish_reason=FinishReason.ERROR, error=error)
    kind = FinishReason.DEADLINE if reason is AbortReason.DEADLINE else FinishReason.CANCELLED
    return Ending(finish_reason=kind, error=GenerationAborted(reason))
