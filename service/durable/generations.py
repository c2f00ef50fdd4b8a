"""All durable generations of this process: begins them, finds them again, and goes on with what the disk has kept.

A generation is found by its id, or by the identical request of the same caller: then the key of the request is looked
up, which covers all that decides its tokens. Used on the loop; whatever waits for the disk runs beside it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import CheckpointMismatchError, EngineError, NotFoundError, UnavailableError
from service.durable.call import DurableCall
from service.durable.found import FoundGeneration, find_found, open_found
from service.durable.generation import DurableGeneration
from service.durable.token_log import TokenLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.durability import Continuation, DurableFolder
    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import DurableAcceptance, Engine
    from service.durable.generation import Attachment
    from service.durable.header import LogHeader
    from service.live import LiveGenerations

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a generation may be held by somebody who is letting go of it, before a caller is told to try again.
BUSY_SECONDS: Final = 1.0
BUSY_PAUSE_SECONDS: Final = 0.05
MAX_ENDED: Final = 256
"""Generations that have come to their end and are still held: each locks a folder, which takes a descriptor."""


class DurableGenerations:
    """Owner of every `DurableGeneration`."""

    def __init__(self, engine: Engine, live: LiveGenerations, *, grace_seconds: float) -> None:
        """One that nobody reads goes on for `grace_seconds`; one whose end was sent can be read again for so long."""
        self._engine = engine
        self._live = live
        self._grace_seconds = grace_seconds
        self._here: dict[str, DurableGeneration] = {}
        self._has_told_of_no_log = False

    @property
    def here(self) -> tuple[DurableGeneration, ...]:
        """Those that this process holds: they run, are read, or have ended not long ago."""
        return tuple(self._here.values())

    @property
    def detached_ids(self) -> frozenset[str]:
        """Ids of those that run and that nobody reads."""
        return frozenset(one.generation_id for one in self.here if one.is_running and not one.is_read)

    async def generate(self, call: DurableCall) -> Attachment:
        """Begin a generation, or go on with that of the identical request of the same caller.

        Raises:
            EngineError: see `Engine.generate`; nothing of the request remains.
        """
        self._live.require_open()
        acceptance = await self._engine.prepare(call.request)
        key = call.key(acceptance)
        found = None
        if self._joinable(key, call.request.request_id) is None:
            asked = (key, call.request.caller, acceptance.prompt_ids)
            found = await _beside(find_found, self._engine.durable_store, *asked, undo=_let_go)
        here = self._joinable(key, call.request.request_id)
        if here is not None or (found is not None and found.identity != acceptance.identity):
            _let_go(found)
            found = None
        if here is None and found is not None:
            here = self._go_on(call, acceptance, found)
        elif here is None:
            here = await self._begin(call, acceptance, key)
        return here.attach(0, call.delivery)

    async def resume(self, caller: str, generation_id: str, after_sequence: int) -> Attachment:
        """Read a generation on from after a message; it goes on where it stands, or from disk.

        Raises:
            NotFoundError: the caller has no such generation.
            ResumePointGoneError: it had, or the message was never sent.
            CheckpointMismatchError: it was made with what is not served now.
            CheckpointDamagedError: what is kept of it is damaged.
            UnavailableError: another process holds it.
        """
        self._live.require_open()
        here = self._here.get(generation_id)
        if here is not None:
            _require_owner(here.log.header, caller)
            if here.is_running or here.log.has_come_to_its_end:
                return here.attach(after_sequence)
            here.leave()
        found = await self._opened(generation_id)
        try:
            generation = await self._revived(found, caller, after_sequence)
        except BaseException:
            found.let_go()
            raise
        return generation.attach(after_sequence)

    async def forget(self, caller: str, generation_id: str) -> GenerationFinished | None:
        """Drop what is kept of a generation of this caller that does not run; without effect if there is none.

        One that has come to its end here is let go of and stays on disk, as one that was running does: whoever leaves a
        stream does not know how far ahead of them it is. One that another process holds is that one's.

        Returns:
            How it ended, so that whoever asks several servers need ask no other; None where that is not known.
        """
        here = self._here.get(generation_id)
        if here is not None and here.log.header.caller != caller:
            return None
        if here is not None:
            if not here.is_running and not here.is_read:
                here.leave()
            return here.log.ending
        try:
            found = await self._opened(generation_id, patience_seconds=0.0)
        except EngineError:
            return None
        log = found.require_log()
        if log.header.caller != caller:
            found.let_go()
            return None
        found.remove()
        return log.ending

    def drain(self) -> None:
        """The server is about to end: what nobody reads is given up, for another process to go on with."""
        for generation in self.here:
            generation.drain()

    async def wait_given_up(self) -> None:
        """After `drain`: return when nothing is held any more that nobody reads."""
        ending = [task for one in self.here if not one.is_read and (task := one.filling) is not None]
        if ending:
            await asyncio.wait(ending)

    def close(self) -> None:
        """Let go of everything; the engine has stopped."""
        for generation in self.here:
            generation.leave(UnavailableError("stopped", "the service is shutting down"))

    def _joinable(self, key: str, request_id: str) -> DurableGeneration | None:
        """One of this key that is awaited, and that nobody reads or whose very request this is."""
        for generation in self._here.values():
            header = generation.log.header
            is_the_request = bool(request_id) and request_id == header.request_id
            if header.key == key and generation.is_awaited and (is_the_request or not generation.is_read):
                return generation
        return None

    async def _opened(self, generation_id: str, *, patience_seconds: float = BUSY_SECONDS) -> FoundGeneration:
        """What is kept of a generation; whoever holds it may be about to let go of it."""
        store, latest = self._engine.durable_store, asyncio.get_running_loop().time() + patience_seconds
        while True:
            try:
                return await _beside(open_found, store, generation_id, undo=_let_go)
            except UnavailableError:
                if asyncio.get_running_loop().time() > latest:
                    raise
            await asyncio.sleep(BUSY_PAUSE_SECONDS)

    async def _revived(self, found: FoundGeneration, caller: str, after_sequence: int) -> DurableGeneration:
        """What was found by its id, running again if it has not come to its end."""
        log = found.require_log()
        _require_owner(log.header, caller)
        log.position_after(after_sequence)
        call = DurableCall.of_header(log.header)
        if log.has_come_to_its_end:  # whatever is served now
            return self._keep(call, log, found.kept.folder, was_delivered=found.kept.was_delivered)
        found.require_identity(await asyncio.to_thread(self._engine.durable_identity, call.request))
        acceptance = await self._engine.prepare(call.request)
        found.require_identity(acceptance.identity)  # another model may have come meanwhile
        if call.key(acceptance) != found.kept.folder.key:
            raise CheckpointMismatchError(found.generation_id, ["defaults"])
        return self._go_on(call, acceptance, found)

    def _go_on(self, call: DurableCall, acceptance: DurableAcceptance, found: FoundGeneration) -> DurableGeneration:
        """Run what was found, as far as it is known; it is let go of if that fails."""
        folder, log = found.kept.folder, found.log
        if log is not None and log.has_come_to_its_end:
            return self._keep(call, log, folder)
        try:
            self._live.require_open()
            continuation = found.with_prompt(acceptance.prompt_ids).continuation(
                only_logged=acceptance.options.logprobs
            )
            acceptance = acceptance.continuing(folder.generation_id, continuation)
            if log is not None:
                return self._run(call, acceptance, log, folder, continuation)
            log = self._new_log(call, acceptance, folder, folder.key)
            if not log.has_file:
                folder.release()
            return self._run(call, acceptance, log, folder if log.has_file else None, continuation)
        except BaseException:
            found.let_go()
            raise

    async def _begin(self, call: DurableCall, acceptance: DurableAcceptance, key: str) -> DurableGeneration:
        store = self._engine.durable_store
        folder = await _beside(store.create, acceptance.generation_id, key, undo=_discard)
        try:
            self._live.require_open()
            twin = self._joinable(key, call.request.request_id) if call.request.request_id else None
            if twin is not None:  # the same request, sent twice at once
                _discard(folder)
                return twin
            log = self._new_log(call, acceptance, folder, key)
            if not log.has_file:
                _discard(folder)
                folder = None
            return self._run(call, acceptance, log, folder, None)
        except BaseException:
            _discard(folder)
            raise

    def _new_log(
        self, call: DurableCall, acceptance: DurableAcceptance, folder: DurableFolder | None, key: str
    ) -> TokenLog:
        """The log of a generation that is about to begin. A disk that takes no file costs its durability alone."""
        log = TokenLog(call.header(acceptance, key))
        if folder is None:
            return log
        try:
            log.create_file(folder.path)
            self._has_told_of_no_log = False
        except OSError as error:
            if not self._has_told_of_no_log:
                self._has_told_of_no_log = True
                logger.warning("logs of generations cannot be made (%s): they cannot be resumed", error.strerror)
        return log

    def _run(
        self,
        call: DurableCall,
        acceptance: DurableAcceptance,
        log: TokenLog,
        folder: DurableFolder | None,
        continuation: Continuation | None,
    ) -> DurableGeneration:
        attempt = self._engine.begin(call.request, acceptance, folder, continuation)
        self._live.watch(attempt, call.facts)
        generation = self._keep(call, log, folder)
        generation.run(attempt)
        return generation

    def _keep(
        self, call: DurableCall, log: TokenLog, folder: DurableFolder | None, *, was_delivered: bool = False
    ) -> DurableGeneration:
        generation = DurableGeneration(
            log=log,
            delivery=call.delivery,
            folder=folder,
            grace_seconds=self._grace_seconds,
            on_gone=self._forget_here,
            was_delivered=was_delivered,
        )
        self._here[generation.generation_id] = generation
        ended = [one for one in self.here if one is not generation and not one.is_running and not one.is_read]
        for one in ended[: max(0, len(ended) - MAX_ENDED)]:
            one.leave()
        return generation

    def _forget_here(self, generation: DurableGeneration) -> None:
        self._here.pop(generation.generation_id, None)


def _require_owner(header: LogHeader, caller: str) -> None:
    """Raise `NotFoundError` for another caller: what is not theirs is not there."""
    if header.caller != caller:
        raise NotFoundError("generation", header.generation_id)


def _let_go(found: FoundGeneration | None) -> None:
    if found is not None:
        found.let_go()


def _discard(folder: DurableFolder | None) -> None:
    if folder is not None:
        folder.remove(leave_mark=False)


async def _beside(function: Callable[..., T], *arguments: object, undo: Callable[[T], None]) -> T:
    """Call `function` beside the loop. If the caller goes away meanwhile, `undo` gets what it has taken hold of."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(lambda done: undo(done.result()) if done.exception() is None else None)
        raise
