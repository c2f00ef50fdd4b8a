"""One autoregressive generation inside the shared step: where it stands, what it has said, how it ends.

A row owns its caches and its text; it never touches another row. Clock values are seconds, statistics milliseconds.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.events import PrefillProgress, TokensGenerated
from engine.contracts.results import GenerateStats, tokens_per_second
from engine.generation.completion import Completion, Ending
from engine.generation.prefill import PrefillStep, next_prefill_step
from engine.sampling.recipe import Draw, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.errors import EngineError
    from engine.contracts.events import GenerationEvent, GenerationFinished
    from engine.contracts.options import ResolvedOptions
    from engine.contracts.results import FinishReason, GeneratedToken, SampledToken
    from engine.generation.text import TextAssembler


CORRECTION_MEMORY_TOKENS = 64
"""Two corrections within so many tokens make a row wait for its tokens, until so many pass without two."""


@dataclass(frozen=True, slots=True)
class RowUnit:
    """What one row contributes to a step: a stretch of its prompt, or its pending token.

    `ends_alone` when the last of three tokens or more attends by itself.
    """

    tokens: tuple[int, ...]
    samples: bool
    ends_alone: bool = False


@dataclass(frozen=True, slots=True)
class RowFault:
    """Stands for a token that could not be drawn; only its row is at fault."""

    reason: str


class Row:
    """The state of one generation from admission to its end.

    Attributes:
        options: what runs.
        signal: the abort signal.
        prompt: ids of the prompt.
        prompt_tokens: their number.
        caches: the row's state.
    """

    def __init__(
        self,
        *,
        prompt: Sequence[int],
        options: ResolvedOptions,
        signal: AbortSignal,
        text: TextAssembler,
        tail_split: bool,
        submitted_at: float,
        clock: Callable[[], float],
        chunk_is_exact: bool = False,
        converts_at: int | None = None,
    ) -> None:
        """Take a validated prompt and resolved options.

        Args:
            prompt: token ids.
            options: what runs.
            signal: the abort signal.
            text: this row's detokenizer and stop rule.
            tail_split: whether the last prompt token runs alone.
            submitted_at: the clock at submission.
            clock: seconds, from any origin.
            chunk_is_exact: `options.prefill_chunk_size` was asked for and is never narrowed.
            converts_at: the state is quantized once it holds so many tokens, one at least; None means never. What is
                attended to before that must not depend on company, so no chunk crosses this point, and when it is 0
                the first chunk is not narrowed. Exact chunks end at their own multiples again after it.
        """
        self.options = options
        self.signal = signal
        self.prompt = tuple(prompt)
        self.prompt_tokens = len(self.prompt)
        self.caches: list[Cache] = []
        self._completion = Completion(options, text)
        self._generated = self._completion.tokens  # grows with every commit
        self._recipe = Recipe(options)
        self._tail_split = tail_split
        self._clock = clock
        self._chunk_is_exact = chunk_is_exact
        self._converts_at = converts_at
        self._submitted_at = submitted_at
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._newest_token_at: float | None = None
        self._unit_limit: int | None = None
        self._joins_tail = False
        self._fed = self.prompt
        self._fed_tokens = 0
        self._position = 0
        self._is_astray = False
        self._corrected_at: int | None = None
        self._waits_until = 0
        self._cached_tokens = 0
        self._told_prefilled = 0
        self._resumed_tokens = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the row began with."""
        return self._cached_tokens

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens whose state has been written."""
        return min(self._fed_tokens, len(self.prompt))

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that are known already remain to be fed."""
        return self._fed_tokens < len(self._fed)

    @property
    def position(self) -> int:
        """Tokens that the state holds; a restart sets it back."""
        return self._position

    @property
    def state_tokens(self) -> tuple[int, ...]:
        """Ids whose state is written, in order: the prompt, then the generated tokens that were fed back.

        The state holds exactly these, but for one token more while a step that was fed a wrong guess is unread.
        """
        return (self.prompt + tuple(self._generated))[: self._position - self._is_astray]

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Ids of the prompt, then of all committed tokens."""
        return self.prompt + tuple(self._generated)

    @property
    def is_astray(self) -> bool:
        """Whether the state holds a token that turned out to be another, until the step in hand is read."""
        return self._is_astray

    @property
    def unfed_tokens(self) -> int:
        """Known tokens that remain to be fed."""
        return len(self._fed) - self._fed_tokens

    @property
    def next_index(self) -> int:
        """Completion index of the token that will be sampled next."""
        return len(self._generated)

    @property
    def is_guessed_well(self) -> bool:
        """Whether the guess for the next token is worth a step ahead: not while guesses turn out wrong repeatedly."""
        return len(self._generated) >= self._waits_until

    def next_width(self, limit_tokens: int) -> int:
        """Tokens of the next unit when `limit_tokens` may be spent; an exact chunk may pass the limit."""
        return self._prefill_step(limit_tokens).tokens if self.is_prefilling else 1

    def admit(self, caches: list[Cache], cached_tokens: int = 0, *, joins_tail: bool = True) -> None:
        """Take caches that hold the first `cached_tokens` of what is known, and start the clock of the prefill.

        `joins_tail` lets the prompt's last token share a step with what comes before it, where the caches allow that.
        The row takes its seat among others now: rows that are admitted together then copy nobody's state.
        """
        self.caches = caches
        for cache in caches:
            cache.place_for(max(0, len(self.prompt) - cached_tokens))
        self._joins_tail = joins_tail and bool(caches) and all(cache.is_seated for cache in caches)
        self._fed_tokens = self._position = cached_tokens
        self._cached_tokens = self._told_prefilled = min(cached_tokens, len(self.prompt))
        self._admitted_at = self._clock()

    def replay(self, tokens: Sequence[int]) -> tuple[list[GeneratedToken], str, GenerationFinished | None]:
        """Take tokens that another row of this generation has committed; call it before the row is admitted.

        Text, stop rule and penalties are brought to where they were, and nothing is computed. What the state that the
        row is then given does not hold is fed again, the generated tokens one at a time as before: no bit differs.

        Returns:
            The tokens that are shown, their text, and the end if the last of them brings it.
        """
        shown, text, ending = self._completion.commit_all(tokens)
        self._fed = self.prompt + tuple(self._generated[:-1])
        self._resumed_tokens = len(self._generated)
        return shown, text, self._finished(ending)

    def limit_next_unit(self, tokens: int) -> None:
        """Let the next unit be no wider than `tokens`, unless its chunk is exact."""
        self._unit_limit = tokens

    def next_unit(self) -> RowUnit:
        """The work that follows."""
        if not self.is_prefilling:
            return RowUnit((self._generated[-1],), samples=True)
        step = self._prefill_step(self._unit_limit)
        samples = step.final and not self._generated
        return RowUnit(self._fed[step.start : step.end], samples=samples, ends_alone=step.joined)

    def next_draw(self, unread: int | None) -> Draw:
        """The choice of the token after the newest, which stands at place `unread` of a step that nobody has read."""
        history = self._newest_tokens(self._recipe.history_tokens)
        return Draw(self._recipe, len(self._generated) + (unread is not None), history, unread)

    def settle(self, unit: RowUnit) -> None:
        """Record that the state of `unit` has been written."""
        if self.is_prefilling:
            self._fed_tokens += len(unit.tokens)
        self._position += len(unit.tokens)

    def correct(self) -> None:
        """The token that is read now is not the one that the device guessed and that a step ahead may have seen."""
        index = len(self._generated)
        if self._corrected_at is not None and index <= self._corrected_at + CORRECTION_MEMORY_TOKENS:
            self._waits_until = index + CORRECTION_MEMORY_TOKENS
        self._corrected_at = index
        if self._position > len(self.prompt) + index:
            self._is_astray = True

    def step_back(self) -> None:
        """Undo the unit that was fed a wrong guess."""
        self._is_astray = False
        self._position -= 1
        for cache in self.caches:
            cache.trim(1)

    def restart(self, caches: list[Cache]) -> None:
        """Drop a state that can no longer be trusted; what it held is fed again into `caches`, and nothing is lost.

        Generated tokens are fed in wide cuts, but one at a time as before where that matters: where the state is
        quantized, since what shares a cut is attended to unquantized, and where chunks are exact.
        """
        self.close()
        self.caches = caches
        self._fed = self.prompt + tuple(self._generated[:-1])
        self._fed_tokens = self._position = 0
        self._is_astray = False

    def new_progress(self) -> PrefillProgress | None:
        """How far the prompt is, when that is further than was told before."""
        if self._generated or self.prefilled_tokens <= self._told_prefilled:
            return None
        self._told_prefilled = self.prefilled_tokens
        return PrefillProgress(self._told_prefilled, len(self.prompt))

    def receive(self, drawn: SampledToken | None) -> tuple[list[GenerationEvent], GenerationFinished | None]:
        """Take what a step brought, None while the prompt is read; returns what the caller hears and the end."""
        if drawn is None:
            progress = self.new_progress()
            return ([] if progress is None else [progress]), None
        shown, text, finished = self.commit(drawn)
        if shown is None and not text:
            return [], finished
        return [TokensGenerated(() if shown is None else (shown,), text)], finished

    def commit(self, sampled: SampledToken) -> tuple[GeneratedToken | None, str, GenerationFinished | None]:
        """Take a sampled token; returns the token if it is shown, the text that became final, and the end if any."""
        self._newest_token_at = self._clock()
        if self._first_token_at is None:
            self._first_token_at = self._newest_token_at
        shown, text, ending = self._completion.commit(sampled.token, sampled.logprobs)
        return shown, text, self._finished(ending)

    def aborted(self) -> tuple[str, GenerationFinished]:
        """End after the abort signal: the text that was held back, and the end with its statistics."""
        text, ending = self._completion.aborted(self.signal)
        return text, ending.with_stats(self.stats())

    def finished(self, reason: FinishReason, *, error: EngineError | None = None) -> GenerationFinished:
        """The end, with the statistics as they stand."""
        return Ending(finish_reason=reason, error=error).with_stats(self.stats())

    def stats(self) -> GenerateStats:
        """Statistics up to now: what was never reached took no time. Source: reference, autoregressive §1.2."""
        now = self._clock()
        admitted = now if self._admitted_at is None else self._admitted_at
        first = now if self._first_token_at is None else self._first_token_at
        newest = now if self._newest_token_at is None else self._newest_token_at
        prefill_ms, decode_ms = 1000 * (first - admitted), 1000 * (newest - first)
        if self._resumed_tokens:  # the first token was there before
            prefill_ms = 0.0
        prefilled_tokens = len(self.prompt) if self._generated else self.prefilled_tokens
        return GenerateStats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self._cached_tokens,
            generated_tokens=len(self._generated),
            prefill_tps=tokens_per_second(max(0, prefilled_tokens - self._cached_tokens), prefill_ms),
            decode_tps=tokens_per_second(len(self._generated) - self._resumed_tokens, decode_ms),
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            queue_ms=1000 * (admitted - self._submitted_at),
            time_to_first_token_ms=0.0 if self._first_token_at is None else 1000 * (first - self._submitted_at),
            cache_tokens=self.state_tokens,
        )

    def close(self) -> None:
        """Release the row's state; called once, on every path."""
        caches, self.caches = self.caches, []
        with ExitStack() as closing:  # all of them, even if one fails
            for cache in caches:
                closing.callback(cache.close)

    def _finished(self, ending: Ending | None) -> GenerationFinished | None:
        return None if ending is None else ending.with_stats(self.stats())

    def _newest_tokens(self, count: int) -> list[int]:
        """The last `count` of the prompt and the committed tokens, or as many as there are."""
        surplus = len(self._generated) - count
        if surplus >= 0:
            return self._generated[surplus:]
        return [*self.prompt[surplus:], *self._generated]

    def _prefill_step(self, limit_tokens: int | None) -> PrefillStep:
        one_by_one = self._resumed_tokens or self._chunk_is_exact or self._converts_at is not None
        if one_by_one and self._fed_tokens >= len(self.prompt):
            return PrefillStep(self._fed_tokens, self._fed_tokens + 1, final=self.unfed_tokens == 1)
        chunk = self.options.prefill_chunk_size
        is_exact = self._chunk_is_exact or (self._converts_at == 0 and not self._fed_tokens)
        if limit_tokens is not None and not is_exact:
            chunk = min(chunk, limit_tokens)
        if self._converts_at is not None and self._fed_tokens < self._converts_at:
            chunk = min(chunk, self._converts_at - self._fed_tokens)
        elif self._converts_at and self._chunk_is_exact:
            chunk = min(chunk, chunk - self._fed_tokens % chunk)
        length = len(self.prompt) if one_by_one else len(self._fed)
        return next_prefill_step(
            length=length,
            position=self._fed_tokens,
            chunk_size=chunk,
            tail_split=self._tail_split,
            joins_tail=self._joins_tail,
        )
