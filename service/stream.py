"""One generation's messages on the wire: numbered, packed, and never silent for long.

Used by one handler. Times are seconds of the loop's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.contracts.events import CanvasRevised, GenerationStarted, PrefillProgress, TokensGenerated
from mlxstream.v1 import event_pb2, generation_pb2
from service.delivery import ChunkBuffer
from service.encode import encode_block, encode_chunk, encode_finished, encode_heartbeat, encode_started

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.contracts.events import GenerationEvent, GenerationFinished
    from mlxstream.v1 import error_pb2
    from service.delivery import Delivery
    from service.measures import Measures

    # Told of each message before it is sent: its number, and the tokens and characters that have been sent with it.
    Record: TypeAlias = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class SentBefore:
    """What one message of an earlier stream of this generation has brought."""

    generated: TokensGenerated


class ResponseStream:
    """Writes the stream grammar: started, then chunks and heartbeats, then finished."""

    def __init__(
        self,
        write: Callable[[generation_pb2.GenerateResponse], Awaitable[None]],
        delivery: Delivery,
        clock: Callable[[], float],
        metrics: Measures | None = None,
        *,
        after_sequence: int = 0,
        record: Record | None = None,
    ) -> None:
        """Nothing is sent before the generation has started, so that callers may retry until then.

        `metrics` hears how tokens travel. A stream that is resumed begins with `after_sequence`, which is the number
        of its Started, and counts on; `record` is told of each message.
        """
        self._write = write
        self._metrics = metrics
        self._tokens_at: float | None = None
        self._delivery = delivery
        self._clock = clock
        self._record = record
        self._sequence = after_sequence
        self._started = False
        self._tokens = self._characters = 0
        self._sent_at = clock()
        self._progress = PrefillProgress(0, 0)
        self._block_index, self._revisions = 0, 0
        self._buffer = ChunkBuffer(
            max_tokens=delivery.max_tokens_per_message, max_delay_seconds=delivery.max_delay_seconds
        )

    @property
    def started(self) -> bool:
        """Whether a message has been sent."""
        return self._started

    @property
    def due_at(self) -> float | None:
        """When something must be sent without a further event; None for never."""
        tokens_at, silence_seconds = self._buffer.due_at, self._delivery.heartbeat_seconds
        if silence_seconds is None or not self._started:
            return tokens_at
        heartbeat_at = self._sent_at + silence_seconds
        return heartbeat_at if tokens_at is None else min(tokens_at, heartbeat_at)

    async def send_due(self) -> None:
        """Send the tokens that have waited long enough; after too long a silence, a heartbeat."""
        now = self._clock()
        if self.due_at is None or now < self.due_at:
            return
        chunks = self._buffer.take(now)
        await self._send_chunks(chunks)
        if not chunks:
            await self._send(heartbeat=encode_heartbeat(self._progress))

    async def handle(self, event: GenerationEvent | event_pb2.Started | SentBefore) -> None:
        """Send what `event` makes ready."""
        match event:
            case TokensGenerated():
                await self._pass_on(event)
            case GenerationStarted():
                await self.handle(encode_started(event))
            case event_pb2.Started():
                self._progress = PrefillProgress(event.cached_tokens, event.prompt_tokens)
                self._sequence -= self._sequence > 0
                self._started = True
                await self._send(started=event)
            case SentBefore():
                await self._send_again(event.generated)
            case PrefillProgress():
                self._progress = event
            case CanvasRevised():
                await self._send(block=encode_block(event, self._revision(event.block_index)))

    async def _pass_on(self, generated: TokensGenerated) -> None:
        """Send tokens when they are due. This is done for each token, beside a step that wants every core."""
        if self._progress.prefilled_tokens != self._progress.prompt_tokens:
            self._progress = PrefillProgress(self._progress.prompt_tokens, self._progress.prompt_tokens)
        now, delivery = self._clock(), self._delivery
        self._note_arrival(now)
        if not delivery.include_text:
            generated = TokensGenerated(generated.tokens, "")
        waits = self._buffer.due_at is not None or delivery.max_delay_seconds > 0.0
        if waits or not 0 < len(generated.tokens) <= delivery.max_tokens_per_message:
            self._buffer.add(generated, now)
            await self._send_chunks(self._buffer.take(self._clock()))
        else:
            await self._send_chunks([generated])

    async def _send_again(self, generated: TokensGenerated) -> None:
        """A message that is cut as it was; one that brought nothing was a sign of life."""
        if generated.tokens or generated.text:
            text = generated.text if self._delivery.include_text else ""
            await self._send_chunks([TokensGenerated(generated.tokens, text)])
        else:
            await self._send(heartbeat=encode_heartbeat(self._progress))

    async def finish(self, finished: GenerationFinished, error: error_pb2.GenerationError | None) -> None:
        """Send what still waits, and the end. A generation that never started ends by its status alone."""
        if not self.started:
            return
        await self._send_chunks(self._buffer.take(self._clock(), everything=True))
        with_cache_tokens = self._delivery.include_cache_tokens
        await self._send(finished=encode_finished(finished, error, with_cache_tokens=with_cache_tokens))

    def _revision(self, block_index: int) -> int:
        """How many canvases of the block have been sent; one more is about to be."""
        if block_index != self._block_index:
            self._block_index, self._revisions = block_index, 0
        self._revisions += 1
        return self._revisions - 1

    def _note_arrival(self, now: float) -> None:
        if self._metrics is not None and self._tokens_at is not None:
            self._metrics.waited_for_tokens(now - self._tokens_at)
        self._tokens_at = now

    async def _send_chunks(self, chunks: list[TokensGenerated]) -> None:
        for chunk in chunks:
            if self._metrics is not None and chunk.tokens:
                self._metrics.sent(len(chunk.tokens))
            with_bytes = self._delivery.include_token_bytes
            self._tokens += len(chunk.tokens)
            self._characters += len(chunk.text)
            await self._send(chunk=encode_chunk(chunk.tokens, chunk.text, with_bytes=with_bytes))

    async def _send(self, **event: Any) -> None:
        self._sequence += 1
        if self._record is not None:
            self._record(self._sequence, self._tokens, self._characters)
        await self._write(generation_pb2.GenerateResponse(sequence=self._sequence, **event))
        self._sent_at = self._clock()
