"""One durable generation in this process: its log, the attempt that fills it, and the one call that reads it.

It outlives the call. While nobody reads, it goes on for a grace period; then its row is given up and its folder let go
of, so that it can go on from disk. Used on the loop alone. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import CheckpointDamagedError, EngineError
from engine.contracts.events import GenerationFinished, GenerationStarted, PrefillProgress, TokensGenerated
from engine.contracts.results import FinishReason
from service.durable.reader import LogReader
from service.encode import encode_started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.contracts.durability import DurableFolder
    from engine.execution.engine import Generation
    from service.delivery import Delivery
    from service.durable.token_log import TokenLog

logger = logging.getLogger(__name__)


class Attachment:
    """One call's hold on a durable generation: what it reads, and from which number on its messages count."""

    def __init__(
        self,
        generation: DurableGeneration,
        reader: LogReader,
        *,
        delivery: Delivery,
        after_sequence: int,
    ) -> None:
        """Made by `DurableGeneration.attach`."""
        self.after_sequence = after_sequence
        self.generation = generation
        self.reader = reader
        self.delivery = delivery
        self._base = reader.position

    def abort(self, reason: AbortReason) -> None:
        """End the attempt that is under way, if one is, unless another call reads it by now."""
        if not self.reader.is_taken:
            self.generation.abort(reason)

    def record(self, sequence: int, tokens: int, characters: int) -> None:
        """A message of this number is about to be sent; so many tokens and characters of this call lead up to it.

        Raises:
            TakenOverError: another call has taken the generation over; the message must not be sent.
        """
        self.reader.require_place()
        base = self._base
        position = base._replace(tokens=base.tokens + tokens, characters=base.characters + characters)
        self.generation.log.mark(sequence, position)

    def deliver(self) -> None:
        """Everything was sent, the end too.

        Raises:
            TakenOverError: another call has taken the generation over; whether the end arrives is for that one to say.
        """
        self.reader.require_place()
        self.generation.deliver()

    def lose(self, reason: EngineError | None = None) -> None:
        """This call ends where it waits for an event, or comes to send a message; by default another reads from now on.

        A message that is being sent is not cut off, since gRPC takes no status before it is through; if its reader has
        stopped reading, the call ends with its connection, and holds nothing up until then.
        """
        self.reader.take_away(reason)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let go of the generation at the end of the block, however it comes."""
        try:
            yield
        finally:
            self.reader.close()
            self.generation.detach(self)


class DurableGeneration:
    """See the module. `on_gone` is called once nothing of it is left in this process."""

    def __init__(
        self,
        *,
        log: TokenLog,
        delivery: Delivery,
        folder: DurableFolder | None,
        grace_seconds: float,
        on_gone: Callable[[DurableGeneration], None],
        was_delivered: bool = False,
    ) -> None:
        """Nothing runs yet. Without a `folder` it ends with this process, or its grace period."""
        self.log = log
        self.delivery = delivery
        self._was_delivered = was_delivered
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._on_gone = on_gone
        self._attempt: Generation | None = None
        self._filling: asyncio.Task[None] | None = None
        self._attachment: Attachment | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._is_draining = False

    @property
    def generation_id(self) -> str:
        """The server's id of it."""
        return self.log.header.generation_id

    @property
    def is_read(self) -> bool:
        """Whether a call reads it."""
        return self._attachment is not None

    @property
    def is_running(self) -> bool:
        """Whether an attempt is under way."""
        return self._attempt is not None

    @property
    def filling(self) -> asyncio.Task[None] | None:
        """What ends once an attempt is over and what follows from that is done; None before the first."""
        return self._filling

    @property
    def is_awaited(self) -> bool:
        """Whether it is going on, or has come to an end that nobody has had."""
        return self.is_running or (self.log.has_come_to_its_end and not self._was_delivered)

    def run(self, attempt: Generation) -> None:
        """Fill the log from `attempt` until that ends."""
        self._attempt = attempt
        self.log.begin_attempt()
        self._filling = asyncio.get_running_loop().create_task(self._fill(attempt))

    def abort(self, reason: AbortReason) -> None:
        """End the attempt that is under way, if one is."""
        if self._attempt is not None:
            self._attempt.abort(reason)

    def deliver(self) -> None:
        """The own end was sent: nobody waits for it any more, but by a loss on the way."""
        self._was_delivered = self.log.has_come_to_its_end

    def attach(self, after_sequence: int, delivery: Delivery | None = None) -> Attachment:
        """Read on from there, in the place of any other call; `delivery` None packs messages as for the one before.

        Raises:
            EngineError: no message of that number was sent, or it is not known; see `TokenLog.position_after`.
        """
        reader = LogReader(self.log, after_sequence)
        if self._attachment is not None:
            self._attachment.lose()
        self._stop_timer()
        self.delivery = delivery or self.delivery
        self._attachment = Attachment(self, reader, delivery=self.delivery, after_sequence=after_sequence)
        return self._attachment

    def detach(self, attachment: Attachment) -> None:
        """That call reads no more. Without effect if another one has come."""
        if self._attachment is attachment:
            self._attachment = None
            if self._is_draining:
                self._hand_over()
            self._settle()

    def leave(self, reason: EngineError | None = None) -> None:
        """Let go of everything now: to go on anew, for others to have room, or at the end of the process.

        A reader is told `reason`. What is kept on disk stays, if the end was sent for its time alone.
        """
        self.abort(AbortReason.DISCONNECTED)
        if self._attachment is not None:
            self._attachment.lose(reason)
            self._attachment = None
        self._go(remove=False)

    def drain(self) -> None:
        """Give it up as soon as nobody reads, row and folder: the server is about to end."""
        self._is_draining = True
        if self._attachment is None:
            self._hand_over()

    async def _fill(self, attempt: Generation) -> None:
        """Take over everything that `attempt` says."""
        try:
            finished = await self._filled(attempt)
        except CheckpointDamagedError as error:
            attempt.abort(AbortReason.DISCONNECTED)
            finished = failed(await attempt.finished(), error)
        except Exception as error:
            logger.exception("a durable generation cannot be logged")
            attempt.abort(AbortReason.DISCONNECTED)
            finished = failed(await attempt.finished(), EngineError(str(type(error).__name__)))
        self._attempt = None
        self.log.end(finished)
        self._settle()

    async def _filled(self, attempt: Generation) -> GenerationFinished:
        while True:
            match await attempt.next_event():
                case GenerationStarted() as started:
                    self.log.start(encode_started(started))
                case PrefillProgress() as progress:
                    self.log.prefilled(progress)
                case TokensGenerated() as generated:
                    self.log.add(generated)
                case GenerationFinished() as finished:
                    return finished

    def _settle(self) -> None:
        """What follows now that nobody reads, or nothing runs, or both."""
        if self._attachment is not None or self._gone:
            return
        if self._is_draining and not self.is_running:
            self._hand_over()
        elif self.is_running or self.log.has_come_to_its_end:
            self._stop_timer()
            if not self.is_running:
                self.log.rest_file()
            self._note_delivery()
            self._timer = asyncio.get_running_loop().call_later(self._grace_seconds, self._give_up)
        else:
            self._go(remove=False)

    def _hand_over(self) -> None:
        """Leave it to another process: what was sent may be lost on the way still."""
        if self.is_running:
            self.abort(AbortReason.SHUTDOWN)
        else:
            self._go(remove=False)

    def _give_up(self) -> None:
        """Nobody has come in time. The end of the attempt, if there is one, leads to the rest."""
        if self.is_running:
            self.abort(AbortReason.DISCONNECTED)
        else:
            self._go(remove=self._was_delivered)

    def _go(self, *, remove: bool) -> None:
        """Let go of file and folder, and `remove` what nobody needs any more."""
        if self._gone:
            return
        self._gone = True
        self._stop_timer()
        self.log.close_file()
        if self._folder is not None and remove:
            self._folder.remove(leave_mark=True)
        elif self._folder is not None:
            self._note_delivery()
            self._folder.release()
        self._on_gone(self)

    def _note_delivery(self) -> None:
        """If it was delivered, let its time on disk begin, which others see to if this process ends before."""
        if self._was_delivered and self._folder is not None:
            self._folder.deliver(keep_seconds=self._grace_seconds)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def failed(finished: GenerationFinished, error: EngineError) -> GenerationFinished:
    """The end of an attempt that was ended because of `error`."""
    return GenerationFinished(finish_reason=FinishReason.ERROR, stats=finished.stats, error=error)
