"""One generation by block diffusion: where it stands, what it has said, how it ends.

A row owns its encoder state, its block and its text; nothing of a block is said as final before all of it is. Clock
values are seconds, statistics milliseconds. What is on the device is only held here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.events import CanvasRevised, PrefillProgress, TokensGenerated
from engine.contracts.results import DenoisingStats, GenerateStats, tokens_per_second
from engine.generation.completion import Completion, Ending
from engine.generation.denoising_schedule import canvas_tokens
from engine.generation.image_stretches import images_within, unit_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.denoising import DenoisingPlan, DenoisingState
    from engine.contracts.errors import EngineError
    from engine.contracts.events import GenerationEvent, GenerationFinished
    from engine.contracts.options import ResolvedOptions
    from engine.contracts.results import FinishReason
    from engine.contracts.vision import PromptImage
    from engine.generation.canvas_block import CanvasBlock
    from engine.generation.text import TextAssembler
    from engine.sampling.keys import KeySequence


@dataclass(frozen=True, slots=True)
class DenoisingUnit:
    """One bounded piece of work: tokens to encode, with the images among them, then a pass if it `revises`."""

    tokens: tuple[int, ...]
    revises: bool
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class RevisedCanvas:
    """What a pass has left on the host: the canvas if it was asked for or is final, and whether the block `ends`."""

    tokens: tuple[int, ...]
    ends: bool


class DenoisingRow:
    """The state of one generation from admission to its end.

    Attributes:
        options: what runs.
        plan: how it is denoised.
        signal: the abort signal.
        prompt: ids of the prompt.
        prompt_tokens: their number.
        cached_tokens: none: no state is kept for others.
        draft_blocks: whether the caller wants canvases under revision.
        caches: nothing that could be kept for other rows.
        state: the encoded tokens; None before the first.
        block: the block in hand; None between blocks.
        keys: the keys of random draws; None before the first block.
    """

    def __init__(
        self,
        *,
        prompt: Sequence[int],
        options: ResolvedOptions,
        plan: DenoisingPlan,
        signal: AbortSignal,
        text: TextAssembler,
        submitted_at: float,
        clock: Callable[[], float],
        draft_blocks: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> None:
        """Take a validated prompt, its images and resolved options; `submitted_at` is the `clock` at submission."""
        self.options = options
        self.plan = plan
        self.signal = signal
        self.prompt = tuple(prompt)
        self.prompt_tokens = len(self.prompt)
        self.cached_tokens = 0
        self.draft_blocks = draft_blocks
        self.caches: list[Cache] = []
        self.state: DenoisingState | None = None
        self.block: CanvasBlock | None = None
        self.keys: KeySequence | None = None
        self._keys_at_block: KeySequence | None = None
        self._completion = Completion(options, text)
        self._images = tuple(images)
        self._clock = clock
        self._submitted_at = submitted_at
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._encodable = self.prompt
        self._encoded_tokens = 0
        self._finished_canvas: tuple[int, ...] = ()
        self._finished_passes = 0
        self._told_prefilled = 0
        self._blocks = 0
        self._canvas_tokens = 0
        self._delivered_tokens = 0

    @property
    def state_tokens(self) -> tuple[int, ...]:
        """Ids that are encoded: the prompt, then whole canvases."""
        return self._encodable[: self._encoded_tokens]

    @property
    def next_index(self) -> int:
        """Completion index of the token that will be delivered next."""
        return self._delivered_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens remain to be encoded, apart from a canvas that has just been finished."""
        return self._encoded_tokens < len(self._encodable)

    @property
    def unfed_tokens(self) -> int:
        """Known tokens that remain to be encoded."""
        return len(self._encodable) - self._encoded_tokens

    @property
    def position(self) -> int:
        """Tokens encoded and passes made, of which none has to be done again; a restart sets it back."""
        return self._encoded_tokens + self._passes

    @property
    def next_canvas_tokens(self) -> int:
        """Positions of the next block."""
        return canvas_tokens(self.plan, self.options.max_tokens - len(self._completion.tokens))

    def next_width(self, limit_tokens: int) -> int:  # noqa: ARG002 - chunks are the same in any company
        """Tokens of the next unit; one for a pass."""
        return len(self.next_unit().tokens) if self.is_prefilling else 1

    def limit_next_unit(self, tokens: int) -> None:
        """Nothing: what a row computes does not depend on its company."""

    def admit(self, caches: list[Cache], cached_tokens: int = 0, *, joins_tail: bool = True) -> None:  # noqa: ARG002
        """Start the clock."""
        self._admitted_at = self._clock()

    def next_unit(self) -> DenoisingUnit:
        """The work that follows: a chunk of the prompt; or a pass, before which a finished canvas is encoded."""
        if self.is_prefilling:
            start = self._encoded_tokens
            end = unit_end(self._images, start, start + self.options.prefill_chunk_size)
            images = images_within(self._images, start, end)
            return DenoisingUnit(self._encodable[start:end], revises=False, images=images)
        return DenoisingUnit(self._finished_canvas, revises=True)

    def encoded(self, tokens: Sequence[int]) -> None:
        """Record that the state holds `tokens` too, which were those of `next_unit`."""
        if not self.is_prefilling:
            self._encodable += tuple(tokens)
            self._finished_canvas = ()
        self._encoded_tokens += len(tokens)

    def begin_block(self, block: CanvasBlock, keys: KeySequence, keys_before: KeySequence) -> None:
        """Take a fresh block and the keys after its first draw; `keys_before` would draw it again."""
        self.block, self.keys, self._keys_at_block = block, keys, keys_before

    def restart(self, caches: list[Cache]) -> None:  # noqa: ARG002 - see `caches`
        """Drop a state that can no longer be trusted: known tokens are encoded again, and the block begins anew.

        Its draws are the same ones, so that nothing that was said changes.
        """
        if self.block is not None:
            self.keys = self._keys_at_block
        self.close()
        self._encoded_tokens = 0

    def receive(self, drawn: RevisedCanvas | None) -> tuple[list[GenerationEvent], GenerationFinished | None]:
        """Take what a unit brought, None while the prompt is read; returns what the caller hears and the end."""
        if drawn is None:
            return self._new_progress(), None
        events: list[GenerationEvent] = []
        if self.draft_blocks:
            made = 0 if self.block is None else self.block.passes
            events.append(CanvasRevised(block_index=self._blocks, step=made, tokens=drawn.tokens, committed=drawn.ends))
        if not drawn.ends:
            return events, None
        self._finish_block(drawn.tokens)
        shown, text, ending = self._completion.commit_all(drawn.tokens)
        self._delivered_tokens += len(shown)
        if shown and self._first_token_at is None:
            self._first_token_at = self._clock()
        if shown or text:
            events.append(TokensGenerated(tuple(shown), text))
        return events, None if ending is None else ending.with_stats(self.stats())

    def aborted(self) -> tuple[str, GenerationFinished]:
        """End after the abort signal: the text that was held back, and the end with its statistics."""
        text, ending = self._completion.aborted(self.signal)
        return text, ending.with_stats(self.stats())

    def finished(self, reason: FinishReason, *, error: EngineError | None = None) -> GenerationFinished:
        """The end, with the statistics as they stand."""
        return Ending(finish_reason=reason, error=error).with_stats(self.stats())

    def stats(self) -> GenerateStats:
        """Statistics up to now. Source: reference, denoising-and-models §3: decoding includes the prefill."""
        now = self._clock()
        admitted = now if self._admitted_at is None else self._admitted_at
        decode_ms = 1000 * (now - admitted)
        first = self._submitted_at if self._first_token_at is None else self._first_token_at
        return GenerateStats(
            prompt_tokens=len(self.prompt),
            generated_tokens=self._delivered_tokens,
            decode_tps=tokens_per_second(self._delivered_tokens, decode_ms),
            decode_ms=decode_ms,
            queue_ms=1000 * (admitted - self._submitted_at),
            time_to_first_token_ms=1000 * (first - self._submitted_at),
            denoising=DenoisingStats(steps=self._passes, blocks=self._blocks, canvas_tokens=self._canvas_tokens),
        )

    def close(self) -> None:
        """Release what the row holds on the device."""
        state, self.state, self.block = self.state, None, None
        if state is not None:
            state.close()

    @property
    def _passes(self) -> int:
        return self._finished_passes + (0 if self.block is None else self.block.passes)

    def _new_progress(self) -> list[GenerationEvent]:
        prefilled = min(self._encoded_tokens, len(self.prompt))
        if prefilled <= self._told_prefilled:
            return []
        self._told_prefilled = prefilled
        return [PrefillProgress(prefilled, len(self.prompt))]

    def _finish_block(self, canvas: tuple[int, ...]) -> None:
        """All of the canvas is encoded before the next block, tokens that are not delivered too."""
        self._finished_passes, self.block = self._passes, None
        self._finished_canvas = canvas
        self._blocks += 1
        self._canvas_tokens += len(canvas)
