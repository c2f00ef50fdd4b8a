"""Which model is resident, and every change of that: loads, unloads, adapters on and off, one change at a time.

Lives on the loop; what touches a tensor goes to the engine thread as an errand. A load that fails leaves everything
as it was; one that succeeds takes the place of the model before, whose rows run to their own end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.adapters.files import open_adapter
from engine.contracts.adapters import ID_RULE, is_adapter_id
from engine.contracts.errors import (
    ConfigurationError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedOptionError,
)
from engine.contracts.load import LoadPhase, UnloadReport, no_load_progress
from engine.contracts.memory import MemoryReading
from engine.contracts.prefix import salt_mark
from engine.execution.adapter_folders import adapter_folder
from engine.execution.errands import at_once
from engine.execution.resident import find_files, load_on_engine_thread, open_text, prepare
from engine.execution.state_room import smallest_request_bytes
from engine.generation.memory import PREFIX_SHARE, usable_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.load import ClearReport, LoadProgress
    from engine.execution.delivery import Dispatcher
    from engine.execution.job import Stepper
    from engine.execution.resident import EngineSettings, ModelFiles, Resident
    from engine.execution.side_work import SideWork
    from engine.execution.text_model import TextModel
    from engine.execution.thread import EngineThread
    from engine.runtime.prepare import Runtime

T = TypeVar("T")

BUSY_RETRY_SECONDS: Final = 5.0


class Residency:
    """Owner of the resident model. Used on the loop, but for what `first` returns.

    A change goes on when its caller leaves, except for a load, which ends.
    """

    def __init__(
        self, settings: EngineSettings, text_work: SideWork, dispatcher: Dispatcher, changed: Callable[[], None]
    ) -> None:
        """Nothing is resident yet. `changed` is told on the loop when a later model has come, or one has gone."""
        self.current: Resident | None = None
        self._settings = settings
        self._text_work = text_work
        self._dispatcher = dispatcher
        self._thread: EngineThread | None = None
        self._runtime: Runtime | None = None
        self._first_name = ""
        self._stopping = False
        self._change: asyncio.Future[Any] | None = None
        self._changed = changed
        self._retirements: set[asyncio.Future[None]] = set()

    def first(self, report: Callable[[Resident], None], reading: asyncio.Event) -> Callable[[], Stepper]:
        """Begin to find the files of the first model; the result loads it and `report`s it, on the engine thread.

        `reading` is set once a network is waited for, or compiled code reads weights: others get the interpreter.
        """

        def told(one: LoadProgress) -> None:
            if one.phase is LoadPhase.FETCHING and not reading.is_set():
                self._dispatcher.call(reading.set)

        def begin_text() -> Future[TextModel]:
            self._dispatcher.call(reading.set)
            return self._text_work.submit(open_text, files)

        files = self._text_work.submit(partial(find_files, progress=told), self._settings)

        def load() -> Stepper:
            self._runtime = prepare(self._settings)
            stepper, resident = load_on_engine_thread(
                self._settings,
                self._runtime,
                files,
                begin_text,
                is_unwanted=lambda: self._stopping,
                progress=told,
            )
            report(resident)
            return stepper

        return load

    def begin(self, resident: Resident, thread: EngineThread) -> None:
        """The first model is there, and `thread` takes errands."""
        self.current, self._thread, self._first_name = resident, thread, resident.info.name

    def stop(self) -> None:
        """Give up the load at work, and take no further changes."""
        self._stopping = True

    async def load(self, reference: str, progress: Callable[[LoadProgress], None] = no_load_progress) -> Resident:
        """Bring a model in and let it take the place of the one before; returns it once it is warm.

        Cancelling ends the load; what a hub still brings then is ignored. Rows of the model before keep running
        meanwhile, a step between any two tensors.

        Args:
            reference: an alias, a repository, or the name of the model that the engine was started with.
            progress: told on the loop what is done.

        Raises:
            OverloadedError: another change is at work.
            EngineError: the model cannot be loaded; what was resident still is.
        """
        abandoned, left = threading.Event(), asyncio.Event()
        try:
            return await self._alone(lambda: self._load(reference, progress, abandoned, left))
        except asyncio.CancelledError:
            abandoned.set()
            left.set()
            raise

    async def unload(self, name: str, end_rows: Callable[[int], int]) -> UnloadReport:
        """Take the resident model off; `end_rows` aborts the generations of a model's number and counts them."""
        return await self._alone(lambda: self._unload(name, end_rows))

    async def mount(self, adapter_id: str, source: str, *, model: str) -> AdapterInfo:
        """Mount the adapter in folder `source` of the adapter directory under `adapter_id`.

        Raises:
            ArtifactError: it cannot be used, or does not fit the model.
            ConfigurationError: other bytes are mounted under this id.
            InvalidRequestError: the id is none, or the source could reach outside.
            NotFoundError: nothing is called so.
        """
        if not is_adapter_id(adapter_id):
            raise InvalidRequestError.of("id", ID_RULE)
        return await self._alone(lambda: self._mount(adapter_id, source, model))

    async def unmount(self, adapter_id: str, *, model: str) -> int:
        """Take an adapter off once no generation uses it any more; new ones are refused at once. Returns its bytes."""
        return await self._alone(lambda: self._unmount(adapter_id, model))

    async def clear_prefixes(self, *, model: str, salt: str | None) -> ClearReport:
        """Forget kept prefixes, all or those of one salt."""
        number, thread = self.require(model).number, self._running_thread()
        mark = "" if salt is None else salt_mark(salt)
        return await self._errand(lambda: thread.batch(number).stepper.prefixes.clear(mark))

    def require(self, name: str) -> Resident:
        """The resident model; "" stands for whichever it is.

        Raises:
            NotFoundError: it has another name.
            UnavailableError: there is none.
        """
        if self.current is None:
            raise UnavailableError("unloaded", "no model is loaded")
        if name and name != self.current.info.name:
            raise NotFoundError("model", name, (self.current.info.name,))
        return self.current

    def memory(self) -> MemoryReading | None:
        """What one more request would come from; None while no model is resident, or where none of it is mlx's."""
        resident, runtime = self.current, self._runtime
        if resident is None or runtime is None:
            return None
        return MemoryReading(
            smallest_request_bytes=smallest_request_bytes(resident.memory),
            state_limit_bytes=resident.state_bytes,
            free_bytes=runtime.memory.host.free_memory_bytes(),
            active_bytes=runtime.memory.active_bytes(),
            active_limit_bytes=runtime.memory.limit_bytes,
        )

    def _running_thread(self) -> EngineThread:
        if self._thread is None:
            raise UnavailableError("loading", "the model is loading")
        if self._stopping:
            raise UnavailableError("stopped", "the service is shutting down")
        return self._thread

    async def _alone(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make `change` unless another one is at work."""
        self._running_thread()
        if self._change is not None and not self._change.done():
            raise OverloadedError(
                "the place for a change of models", limit=1, used=1, retry_after_seconds=BUSY_RETRY_SECONDS
            )
        task = asyncio.ensure_future(change())
        task.add_done_callback(_heard)
        self._change = task
        return await asyncio.shield(task)

    async def _errand(self, work: Callable[[], T], is_due: Callable[[], bool] = at_once) -> T:
        errand = asyncio.wrap_future(self._running_thread().call(work, is_due))
        errand.add_done_callback(_heard)
        return await asyncio.shield(errand)

    async def _load(
        self,
        reference: str,
        progress: Callable[[LoadProgress], None],
        abandoned: threading.Event,
        left: asyncio.Event,
    ) -> Resident:
        settings, paths = self._settings_for(reference)

        def told(one: LoadProgress) -> None:
            if not abandoned.is_set():
                self._dispatcher.call(progress, one)

        pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-stream-load")
        try:
            files = pool.submit(find_files, settings, progress=told, paths=paths)
            await _unless_left(asyncio.wrap_future(files), left)
            text = partial(pool.submit, open_text, files)
            resident = await self._errand(lambda: self._bring_in(settings, files, text, told, abandoned))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        before, self.current = self.current, resident
        self._changed()
        if before is not None:
            retirement = asyncio.ensure_future(self._retire(before))
            self._retirements.add(retirement)
            retirement.add_done_callback(self._retirements.discard)
        return resident

    def _settings_for(self, reference: str) -> tuple[EngineSettings, bool]:
        """How to load `reference`, and whether it may be a path: only what the operator has started us with may.

        That model comes back with the adapters that it was started with.
        """
        if reference in (self._first_name, ""):
            return self._settings, True
        return replace(self._settings, model=reference, adapters=()), False

    def _bring_in(
        self,
        settings: EngineSettings,
        files: Future[ModelFiles],
        text: Callable[[], Future[TextModel]],
        told: Callable[[LoadProgress], None],
        abandoned: threading.Event,
    ) -> Resident:
        """On the engine thread: load beside what is there, which has its turn between any two tensors."""
        thread, runtime = self._running_thread(), self._runtime
        if runtime is None:
            raise UnsupportedOptionError("model", "this engine plays a script and loads no model")

        def is_unwanted() -> bool:
            thread.breathe()
            return self._stopping or abandoned.is_set()

        stepper, resident = load_on_engine_thread(
            settings,
            runtime,
            files,
            text,
            is_unwanted=is_unwanted,
            progress=told,
            beside=self.current is not None,
        )
        return replace(resident, number=thread.add(stepper))

    async def _retire(self, before: Resident) -> None:
        """Release a replaced model once its rows have ended, and give its room to the one that is there now."""
        with contextlib.suppress(EngineError):  # the engine ends, and releases everything
            freed_bytes = await self._remove(before.number)
            await self._make_room(freed_bytes)

    async def _remove(self, number: int) -> int:
        """Release a model once its rows have ended; returns the bytes that it held."""
        thread = self._running_thread()

        def remove() -> int:
            held_bytes = thread.batch(number).stepper.held_bytes
            thread.remove(number)
            return held_bytes

        return await self._errand(remove, lambda: not len(thread.batch(number)))

    async def _make_room(self, freed_bytes: int) -> None:
        """Let rows use what was freed (a negative number: what was taken), where free memory bounds them."""
        resident, thread = self.current, self._running_thread()
        if resident is None or not resident.holds_workspace:
            return
        more_bytes = usable_bytes(freed_bytes) if freed_bytes > 0 else freed_bytes
        prefix_bytes = int(more_bytes * PREFIX_SHARE) if self._settings.prefix_cache_bytes is None else 0

        def widen() -> None:
            batch = thread.batch(resident.number)
            batch.widen(more_bytes)
            batch.stepper.prefixes.widen(prefix_bytes)

        await self._errand(widen)
        if self.current is not None and self.current.number == resident.number:
            self.current = replace(self.current, state_bytes=max(0, self.current.state_bytes + more_bytes))

    async def _unload(self, name: str, end_rows: Callable[[int], int]) -> UnloadReport:
        number = self.require(name).number
        self.current = None
        self._changed()
        aborted = end_rows(number)
        return UnloadReport(freed_bytes=await self._remove(number), aborted_generations=aborted)

    async def _mount(self, adapter_id: str, source: str, model: str) -> AdapterInfo:
        resident, thread = self.require(model), self._running_thread()
        folder = adapter_folder(self._settings.adapters_dir, source)
        files = await asyncio.to_thread(open_adapter, adapter_id, folder)
        mounted = next((one for one in resident.info.adapters if one.id == adapter_id), None)
        if mounted is not None:
            if mounted.revision != files.revision:
                raise ConfigurationError("adapters", f"{adapter_id!r} is mounted with other bytes; unmount it first")
            return mounted
        mounts = thread.batch(resident.number).stepper.adapters
        if mounts is None:
            raise ConfigurationError("adapters", f"the graph of {resident.info.name} takes no adapters")
        info = await self._errand(lambda: mounts.mount(files))
        self._set_adapters((*resident.info.adapters, info))
        await self._make_room(-info.resident_bytes)
        return info

    async def _unmount(self, adapter_id: str, model: str) -> int:
        resident, thread = self.require(model), self._running_thread()
        ids = sorted(one.id for one in resident.info.adapters)
        if adapter_id not in ids:
            raise NotFoundError("adapter", adapter_id, ids)
        self._set_adapters(tuple(one for one in resident.info.adapters if one.id != adapter_id))
        batch = thread.batch(resident.number)
        mounts = batch.stepper.adapters
        if mounts is None:
            return 0
        freed_bytes = await self._errand(lambda: mounts.unmount(adapter_id), lambda: not batch.uses_adapter(adapter_id))
        await self._make_room(freed_bytes)
        return freed_bytes

    def _set_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Serve the resident model with `adapters`. It may have got more room since the change began."""
        resident = self.require("")
        self.current = replace(resident, info=replace(resident.info, adapters=adapters))


def _heard(ended: asyncio.Future[Any]) -> None:
    """Look at how something ended whose caller may have left: asyncio calls a failure that nobody has seen a fault."""
    if not ended.cancelled():
        ended.exception()


async def _unless_left(found: asyncio.Future[ModelFiles], left: asyncio.Event) -> None:
    """Wait until files are found, and no longer than their caller: a hub that does not answer holds nobody up.

    Raises:
        CancelledError: the caller has left; the thread that fetches ends by itself.
        EngineError: no files could be found.
    """
    leaving = asyncio.ensure_future(left.wait())
    waited: tuple[asyncio.Future[Any], ...] = (found, leaving)
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not found.done():
        found.cancel()
        raise asyncio.CancelledError
    found.result()
