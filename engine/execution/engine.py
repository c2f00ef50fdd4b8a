"""The front door: the one class through which a service uses the engine. Lives on an asyncio loop.

Loading and stepping happen on the engine thread; tokenizing and templates run on a small pool beside the loop.
Importing this module never imports mlx: the engine thread does, after the runtime was prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.contracts.cancellation import AbortController, AbortReason
from engine.contracts.errors import EngineError, EngineFailedError, NotFoundError, UnavailableError
from engine.contracts.load import EngineLoad, GenerationStatus, no_load_progress
from engine.execution.accepting import DurableAcceptance as DurableAcceptance  # callers hold it until they begin
from engine.execution.accepting import accept, accept_durable
from engine.execution.beginning import opened_job
from engine.execution.delivery import Dispatcher, Mailbox
from engine.execution.generation import Generation
from engine.execution.residency import Residency
from engine.execution.roster import Roster
from engine.execution.side_work import SideWork
from engine.execution.state_identity import durable_identity
from engine.execution.state_room import estimate
from engine.execution.text_bounds import check_detokenize, check_tokenize
from engine.execution.thread import EngineThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.durability import Continuation, DurableFolder, DurableIdentity, DurableStore
    from engine.contracts.events import GenerationRequest
    from engine.contracts.load import ClearReport, LoadProgress, UnloadReport
    from engine.contracts.memory import MemoryEstimate, MemoryLoad, MemoryReading
    from engine.contracts.model import ModelInfo
    from engine.contracts.prompt import ChatPrompt
    from engine.execution.accepting import Acceptance
    from engine.execution.job import Stepper
    from engine.execution.resident import EngineSettings, Resident

__all__ = ["Engine", "EngineState", "Generation"]

logger = logging.getLogger(__name__)

AcceptanceT = TypeVar("AcceptanceT", bound="Acceptance")

STOP_SECONDS: Final = 10.0
"""How long `stop` waits for the engine thread, which ends after the step in hand."""
STOP_LOADING_SECONDS: Final = 2.0
"""The same while a model loads; a load that hangs in the file system is left behind."""


def _nothing() -> None:
    """An errand that is done when those before it are, and a door that is open."""


class EngineState(enum.Enum):
    """Life of an engine, in order; FAILED and STOPPED are final."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class Engine:
    """One model, shared by all callers."""

    def __init__(self, settings: EngineSettings) -> None:
        """Nothing is loaded before `start`."""
        self._settings = settings
        self._state = EngineState.LOADING
        self._thread: EngineThread | None = None
        self._residency: Residency | None = None
        self._fault: EngineError | None = None
        self._ended = asyncio.Event()
        self._stopping = False
        self._reading = asyncio.Event()
        self._observers: list[Callable[[], None]] = []
        self._live = Roster()
        self._text_work = SideWork("text")
        self._image_work = SideWork("image")

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._state

    @property
    def model(self) -> ModelInfo:
        """The resident model.

        Raises:
            UnavailableError: it is loading, there is none, or the engine has stopped.
            EngineFailedError: the engine thread has died.
        """
        return self._ready().info

    @property
    def can_serve(self) -> bool:
        """Whether a model is resident, and the engine thread takes work for it."""
        return self._state is EngineState.READY and not self._stopping and self._resident is not None

    @property
    def _resident(self) -> Resident | None:
        return None if self._residency is None else self._residency.current

    def load(self) -> EngineLoad:
        """How busy the engine is; all zeros before there is a thread."""
        return EngineLoad(queue_limit=self._settings.max_queue) if self._thread is None else self._thread.load()

    def memory(self) -> MemoryReading | None:
        """What one more request would come from; None while there is no model, or where none of it is mlx's."""
        return None if self._residency is None else self._residency.memory()

    def live_generations(self) -> list[GenerationStatus]:
        """The live generations of all callers, oldest first."""
        return self._live.statuses()

    def stalled_seconds(self) -> float:
        """How long the step in hand has taken; 0 when idle."""
        return self._thread.stalled_seconds() if self._thread is not None else 0.0

    def step_seconds(self) -> float:
        """A recent maximum of the time that a step takes, and so of the time until a signal is seen; 0 if unknown."""
        return self._thread.step_seconds if self._thread is not None else 0.0

    async def start(self) -> ModelInfo:
        """Load and warm the model; call once.

        Raises:
            EngineError: the model cannot be loaded, or `stop` came first.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Resident] = loop.create_future()
        dispatcher = Dispatcher(loop)
        residency = Residency(self._settings, self._text_work, dispatcher, self._changed)
        self._residency = residency

        def report(resident: Resident) -> None:
            dispatcher.call(_resolve, loaded, resident)

        self._thread = EngineThread(
            load=self._begin_loading(report),
            dispatcher=dispatcher,
            on_end=self._on_end,
            max_queue=self._settings.max_queue,
            clock=time.perf_counter,
        )
        self._thread.start()
        ended = asyncio.ensure_future(self._ended.wait())
        first: set[asyncio.Future[Any]] = {loaded, ended}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            self._reading.set()
        if not loaded.done():
            raise self._fault or UnavailableError("stopped")
        await asyncio.wrap_future(self._thread.call(_nothing))  # it has taken the model in, and takes errands
        residency.begin(loaded.result(), self._thread)
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        return self.model

    async def until_reading(self, seconds: float) -> None:
        """Return once the first load leaves the interpreter to others: it fetches files, reads weights, or has ended.

        After `seconds` in any case.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._reading.wait()

    def observe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have `changed` called on the loop whenever `can_serve` may have changed; returns what ends that.

        A change is told before whoever asked for it is answered.
        """
        self._observers.append(changed)
        return partial(self._observers.remove, changed)

    def _changed(self) -> None:
        for observer in self._observers:
            observer()

    async def load_model(
        self, reference: str, progress: Callable[[LoadProgress], None] = no_load_progress
    ) -> ModelInfo:
        """Bring a model in and serve it in place of the one before; see `Residency.load`.

        Raises:
            OverloadedError: another change of models is at work.
            EngineError: the model cannot be loaded; what was resident still is.
        """
        return (await self._changes().load(reference, progress)).info

    async def unload_model(self, name: str) -> UnloadReport:
        """Stop serving the model and free its memory; its generations end as aborted.

        Those of a model that it has replaced run to their own end.
        """
        return await self._changes().unload(name, self._end_rows)

    async def mount_adapter(self, adapter_id: str, source: str, *, model: str) -> AdapterInfo:
        """Mount an adapter over the resident model; see `Residency.mount`."""
        return await self._changes().mount(adapter_id, source, model=model)

    async def unmount_adapter(self, adapter_id: str, *, model: str) -> int:
        """Take an adapter off once no generation uses it; new ones are refused at once. Returns the bytes freed."""
        return await self._changes().unmount(adapter_id, model=model)

    async def clear_prefixes(self, *, model: str, salt: str | None) -> ClearReport:
        """Forget kept prefixes, all or those of one salt."""
        return await self._changes().clear_prefixes(model=model, salt=salt)

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Abort what runs, end the thread and wait for it. Idempotent; also ends a load, at its next tensor.

        A thread that does not answer is left behind after a while, or as soon as `hurry` is set.
        """
        self._stopping = True
        if self._residency is not None:
            self._residency.stop()
        self.abort_all()
        if self._thread is not None:
            self._thread.stop()
            await self._wait_ended(STOP_SECONDS if self._resident is not None else STOP_LOADING_SECONDS, hurry)
        self._live.give_up(UnavailableError("stopped", "the service is shutting down"))
        self._text_work.close()
        self._image_work.close()
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED

    def abort_all(self) -> int:
        """End every live generation as the service's own end does; returns how many."""
        return self._live.abort(AbortReason.SHUTDOWN)

    def _end_rows(self, number: int) -> int:
        """Abort the generations of the model `number`, which is taken off; those of a replaced one go on."""
        return self._live.abort(AbortReason.REQUESTED, of_resident=number)

    def _changes(self) -> Residency:
        """Whom to ask for a change.

        Raises:
            UnavailableError: the first model is not there yet, or the engine has stopped.
            EngineFailedError: the engine thread has died.
        """
        self._require_running()
        if self._residency is None:
            raise UnavailableError("loading", "the model is loading")
        return self._residency

    async def _wait_ended(self, seconds: float, hurry: asyncio.Event | None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ended, hurry) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_failed(self) -> None:
        """Return when the engine thread has died."""
        await self._ended.wait()
        if self._state is not EngineState.FAILED:
            await asyncio.Event().wait()

    async def generate(self, request: GenerationRequest, *, require_open: Callable[[], None] = _nothing) -> Generation:
        """Tokenize, check and queue one request; every refusal is raised here, before anything is held.

        Args:
            request: the request.
            require_open: asked right before it is queued, since checking takes a while; what it raises refuses it.

        Raises:
            EngineError: see the tree; nothing of the request remains.
        """
        self._resolve_model(request.model)
        self._live.require_free(request.caller, request.request_id)
        acceptance = await self._checked(accept, request)
        require_open()
        return self.begin(request, acceptance)

    async def prepare(self, request: GenerationRequest) -> DurableAcceptance:
        """Tokenize and check a request for a durable generation; nothing is held for it yet.

        A `request_id` in use is refused by `begin` alone: this may be the very request of the generation that has it.

        Raises:
            EngineError: see the tree.
        """
        return await self._checked(accept_durable, request)

    async def _checked(
        self, check: Callable[[Resident, GenerationRequest, float], AcceptanceT], request: GenerationRequest
    ) -> AcceptanceT:
        """What `check` makes of a request beside the loop, for the model that is resident when it is done."""
        submitted_at = time.perf_counter()
        while True:
            resident = self._resolve_model(request.model)
            acceptance = await self._text_work.run(check, resident, request, submitted_at)
            images = [await self._image_work.run(place.decoded) for place in acceptance.places]
            if self._ready() is resident:  # else the model or its adapters have changed meanwhile
                return replace(acceptance, places=(), images=tuple(images))

    def begin(
        self,
        request: GenerationRequest,
        acceptance: Acceptance,
        folder: DurableFolder | None = None,
        continuation: Continuation | None = None,
    ) -> Generation:
        """Queue what was accepted.

        Args:
            request: the request itself.
            acceptance: what was made of it; a durable one carries the name and the seed of a generation that goes on.
            folder: where checkpoints go. It stays the caller's, to be released or removed after the end.
            continuation: how far the generation is known; its tokens are told again, after `GenerationStarted`.

        Raises:
            UnavailableError: another model, or other adapters, are resident by now.
            EngineError: it cannot be queued. In either case nothing remains, and the folder is as it was.
        """
        resident = self._ready()
        if acceptance.resident is not resident:
            raise UnavailableError("reloading", "the model or its adapters have changed meanwhile")
        self._live.require_free(request.caller, acceptance.request_id)
        if self._thread is None:
            raise UnavailableError("stopped")
        mailbox = Mailbox(on_finished=lambda: self._live.leave(request.caller, acceptance.request_id))
        controller = AbortController()
        job, finished = opened_job(
            request,
            acceptance,
            signal=controller.signal,
            mailbox=mailbox,
            folder=folder,
            continuation=continuation,
            max_queue_seconds=self._settings.max_queue_seconds,
        )
        generation = Generation(
            generation_id=acceptance.generation_id,
            request_id=acceptance.request_id,
            number=self._live.next_number(),
            resident=resident,
            controller=controller,
            mailbox=mailbox,
            row=job.row,
        )
        if finished is None:
            try:
                self._thread.submit(job, to=resident.number)
            except UnavailableError:
                raise self._thread.fault or UnavailableError("stopped") from None
            self._live.enter(request.caller, generation)
        else:  # nothing is left to generate
            for event in (*job.first_events(), finished):
                mailbox.put(event)
        return generation

    @property
    def durable_store(self) -> DurableStore:
        """Where durable generations are kept.

        Raises:
            UnsupportedOptionError: none can be.
        """
        return self._ready().durable.require()

    def durable_identity(self, request: GenerationRequest) -> DurableIdentity:
        """What a durable generation of `request` would be tied to. The first call takes a while."""
        resident = self._ready()
        return durable_identity(resident.info, resident.text.tokenizer.fingerprint, request.options.adapters)

    def abort(self, *, caller: str, request_id: str = "", generation_id: str = "") -> Generation | None:
        """Raise the abort signal of the caller's live generation of that id; None if there is none."""
        generation = self._live.find(caller, request_id=request_id, generation_id=generation_id)
        if generation is not None:
            generation.abort(AbortReason.REQUESTED)
        return generation

    async def tokenize(
        self, text: str, *, model: str, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[int]:
        """Token ids of `text`."""
        tokenizer = self._resolve_model(model).text.tokenizer
        check_tokenize(text)
        return await self._text_work.run(
            lambda: tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
            )
        )

    async def detokenize(self, ids: Sequence[int], *, model: str, skip_special_tokens: bool) -> str:
        """Text of `ids`, by the same rules as a stream's."""
        tokenizer = self._resolve_model(model).text.tokenizer
        check_detokenize(ids)
        return await self._text_work.run(lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def render_chat(self, chat: ChatPrompt, *, model: str) -> tuple[str, list[int]]:
        """The text and the token ids that a conversation becomes."""
        text = self._resolve_model(model).text
        return await self._text_work.run(text.encode_chat, chat)

    def estimate_memory(self, load: MemoryLoad, *, model: str) -> MemoryEstimate:
        """What `load` would take, by the prediction that admission uses.

        Raises:
            PromptTooLongError: no room for one new token.
        """
        return estimate(self._resolve_model(model).memory, load)

    def token_bytes(self, ids: Sequence[int], *, model: str) -> list[bytes]:
        """The bytes that each of `ids` contributes to the text."""
        tokenizer = self._resolve_model(model).text.tokenizer
        return [tokenizer.token_bytes(token) for token in ids]

    def _begin_loading(self, report: Callable[[Resident], None]) -> Callable[[], Stepper]:
        """Begin what goes on beside the loop; what is returned runs on the engine thread, and `report`s the model."""
        if self._residency is None:
            raise RuntimeError("a load begins before there is a place for its model")
        return self._residency.first(report, self._reading)

    def _resolve_model(self, name: str) -> Resident:
        resident = self._ready()
        if name and name != resident.info.name:
            raise NotFoundError("model", name, (resident.info.name,))
        return resident

    def _ready(self) -> Resident:
        self._require_running()
        resident = self._resident
        if resident is not None:
            return resident
        if self._state is EngineState.LOADING:
            raise UnavailableError("loading", "the model is loading")
        raise UnavailableError("unloaded", "no model is loaded")

    def _require_running(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._state is EngineState.STOPPED or self._stopping:
            raise UnavailableError("stopped", "the service is shutting down")

    def _on_end(self, fault: EngineError | None) -> None:
        if fault is not None and not (self._stopping and isinstance(fault, UnavailableError)):
            self._fault = fault
            self._state = EngineState.FAILED
            if isinstance(fault, EngineFailedError):
                logger.error("the engine has failed: %s", fault)
        self._ended.set()


def _resolve(future: asyncio.Future[Resident], resident: Resident) -> None:
    if not future.done():
        future.set_result(resident)
