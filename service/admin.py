"""AdminService: operators change the model and its adapters, see what runs, and end the taking of work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from engine.contracts.errors import EngineError, InvalidRequestError, NotFoundError
from mlxstream.v1 import admin_pb2
from service.decode import decode_model
from service.decode_values import NANOS_PER_SECOND, nanoseconds, refuse_bad_values, shown
from service.encode_admin import encode_adapter, encode_generation, encode_load, encode_load_progress
from service.encode_model import encode_model_info
from service.paging import ordinal_name, page_of

if TYPE_CHECKING:
    from engine.contracts.load import LoadPhase, LoadProgress
    from engine.execution.engine import Engine
    from service.durable.generations import DurableGenerations
    from service.health import Health
    from service.live import LiveGenerations
    from service.load_meter import LoadMeter
    from service.rpc import Context, Handler

logger = logging.getLogger(__name__)


class AdminHandlers:
    """Answers `mlxstream.v1.AdminService`."""

    def __init__(
        self, engine: Engine, live: LiveGenerations, health: Health, durable: DurableGenerations, meter: LoadMeter
    ) -> None:
        """Acts on `engine`; draining is told to `live` and `health`.

        `durable` knows which generations nobody reads, and rates are read from `meter`.
        """
        self._durable = durable
        self._engine = engine
        self._live = live
        self._health = health
        self._meter = meter

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC."""
        return {
            "LoadModel": self.load_model,
            "UnloadModel": self.unload_model,
            "MountAdapter": self.mount_adapter,
            "UnmountAdapter": self.unmount_adapter,
            "ListAdapters": self.list_adapters,
            "ListGenerations": self.list_generations,
            "GetLoad": self.get_load,
            "ClearPrefixCache": self.clear_prefix_cache,
            "Drain": self.drain,
        }

    async def load_model(self, request: admin_pb2.LoadModelRequest, context: Context) -> None:
        """Load a model, and stream what is done until it serves. A caller who leaves ends the load."""
        reference = decode_model(request.model)
        news = _News()
        loading = asyncio.ensure_future(self._engine.load_model(reference, news.put))
        loading.add_done_callback(lambda _: news.wake())
        try:
            while not loading.done() or news:
                for progress in await news.take():
                    await context.write(encode_load_progress(progress))
            info = await loading
        finally:
            loading.cancel()
        logger.info("model loaded", extra={"fields": {"model": info.name, "load_seconds": round(info.load_seconds, 2)}})
        await context.write(admin_pb2.LoadModelResponse(loaded=encode_model_info(info)))

    async def unload_model(
        self, request: admin_pb2.UnloadModelRequest, _context: Context
    ) -> admin_pb2.UnloadModelResponse:
        """Take the model off, and answer when its memory is free."""
        if not request.model:
            raise InvalidRequestError.of("model", "must name the model")
        report = await self._engine.unload_model(decode_model(request.model))
        logger.info("model unloaded", extra={"fields": {"model": request.model, "freed_bytes": report.freed_bytes}})
        return admin_pb2.UnloadModelResponse(
            freed_bytes=report.freed_bytes, aborted_generations=report.aborted_generations
        )

    async def mount_adapter(
        self, request: admin_pb2.MountAdapterRequest, _context: Context
    ) -> admin_pb2.MountAdapterResponse:
        """Mount an adapter from the operator's folder."""
        info = await self._engine.mount_adapter(request.id, request.source, model=decode_model(request.model))
        return admin_pb2.MountAdapterResponse(adapter=encode_adapter(info))

    async def unmount_adapter(
        self, request: admin_pb2.UnmountAdapterRequest, _context: Context
    ) -> admin_pb2.UnmountAdapterResponse:
        """Take an adapter off, and answer when its last generation has ended and its memory is free."""
        freed_bytes = await self._engine.unmount_adapter(request.id, model=decode_model(request.model))
        return admin_pb2.UnmountAdapterResponse(freed_bytes=freed_bytes)

    async def list_adapters(
        self, request: admin_pb2.ListAdaptersRequest, _context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        """A page of the mounted adapters, by id."""
        model = self._engine.model
        if decode_model(request.model) not in ("", model.name):
            raise NotFoundError("model", request.model, (model.name,))
        page, next_page_token = page_of(
            sorted(model.adapters, key=lambda adapter: adapter.id),
            name=lambda adapter: adapter.id,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        adapters = [encode_adapter(adapter) for adapter in page]
        return admin_pb2.ListAdaptersResponse(adapters=adapters, next_page_token=next_page_token)

    async def list_generations(
        self, request: admin_pb2.ListGenerationsRequest, _context: Context
    ) -> admin_pb2.ListGenerationsResponse:
        """A page of the live generations of all callers, oldest first."""
        page, next_page_token = page_of(
            self._engine.live_generations(),
            name=lambda status: ordinal_name(status.number),
            page_size=request.page_size,
            page_token=request.page_token,
        )
        detached = self._durable.detached_ids
        generations = [encode_generation(status, detached=status.generation_id in detached) for status in page]
        return admin_pb2.ListGenerationsResponse(generations=generations, next_page_token=next_page_token)

    async def get_load(self, _request: admin_pb2.GetLoadRequest, _context: Context) -> admin_pb2.GetLoadResponse:
        """How busy the server is, whatever state it is in."""
        return encode_load(
            self._engine.load(),
            self._meter.rates(),
            model=self._model_name(),
            draining=self._live.is_draining,
            not_ready=self._health.not_ready,
            memory=self._engine.memory(),
        )

    async def clear_prefix_cache(
        self, request: admin_pb2.ClearPrefixCacheRequest, _context: Context
    ) -> admin_pb2.ClearPrefixCacheResponse:
        """Forget kept prefixes."""
        salt = request.salt if request.HasField("salt") else None
        report = await self._engine.clear_prefixes(model=decode_model(request.model), salt=salt)
        return admin_pb2.ClearPrefixCacheResponse(
            cleared_entries=report.cleared_entries, freed_bytes=report.freed_bytes
        )

    async def drain(self, request: admin_pb2.DrainRequest, _context: Context) -> admin_pb2.DrainResponse:
        """Take no new work from now on, and answer when nothing runs any more."""
        seconds = _timeout_seconds(request)
        self._health.drain()
        self._live.drain()
        self._durable.drain()
        before = self._live.ends
        fields = {"live_generations": self._live.count, "timeout_seconds": seconds}
        logger.info("draining", extra={"fields": fields})
        try:
            async with asyncio.timeout(seconds):
                await self._live.wait_idle()
        except TimeoutError:
            self._engine.abort_all()
            await self._live.wait_idle()
        await self._durable.wait_given_up()
        ends = self._live.ends.since(before)
        return admin_pb2.DrainResponse(finished_generations=ends.finished, aborted_generations=ends.stopped)

    def _model_name(self) -> str:
        with contextlib.suppress(EngineError):
            return self._engine.model.name
        return ""


def _timeout_seconds(request: admin_pb2.DrainRequest) -> float | None:
    """How long what runs may go on; None for as long as it takes."""
    if not request.HasField("timeout"):
        return None
    refuse_bad_values(request.timeout, "timeout")
    if nanoseconds(request.timeout) < 0:
        raise InvalidRequestError.of("timeout", f"must not be negative, got {shown(request.timeout)}")
    return nanoseconds(request.timeout) / NANOS_PER_SECOND


class _News:
    """Progress that was not sent yet, the newest of each phase."""

    def __init__(self) -> None:
        self._newest: dict[LoadPhase, LoadProgress] = {}
        self._arrived = asyncio.Event()

    def __bool__(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._newest)

    def put(self, progress: LoadProgress) -> None:
        """Replace what was known of this phase."""
        self._newest[progress.phase] = progress
        self._arrived.set()

    def wake(self) -> None:
        """Let `take` return, with nothing if there is none."""
        self._arrived.set()

    async def take(self) -> list[LoadProgress]:
        """What has arrived since the last time, in the order of phases."""
        await self._arrived.wait()
        self._arrived.clear()
        newest, self._newest = list(self._newest.values()), {}
        return newest
