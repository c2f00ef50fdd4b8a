"""What a server tells about itself while it runs: metrics, rates and traces, each fed at one place.

Used on the loop. Handlers are wrapped, so that no handler counts by itself how it ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from engine.contracts.errors import EngineError
from service.errors import status_of
from service.generation import is_past_deadline
from service.load_meter import LoadMeter
from service.measures import NoMeasures
from service.offer import GENERATION_SERVICE
from service.tracing import NoTracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Engine, Generation
    from service.live import CallFacts
    from service.measures import Measures
    from service.rpc import Context, Handler
    from service.tracing import Tracing


class Telemetry:
    """Where everything that happens is counted."""

    def __init__(self, engine: Engine, tracing: Tracing | None = None, metrics: Measures | None = None) -> None:
        """Watch `engine`; `tracing` None traces nothing, `metrics` None counts nothing."""
        self.metrics: Measures = NoMeasures() if metrics is None else metrics
        self.meter = LoadMeter(engine.load, time.monotonic)
        self.tracing: Tracing = NoTracing() if tracing is None else tracing

    def ended(self, generation: Generation, finished: GenerationFinished, facts: CallFacts) -> None:
        """A generation has ended."""
        self.metrics.ended(generation, finished, facts)
        self.meter.count_end(failed=finished.error is not None)
        self.tracing.ended(generation, finished, facts)

    def refused(self, method: str, error: EngineError) -> None:
        """A call of `method`, "package.Service/Method", was refused before its handler."""
        self.metrics.call_ended(method, status_of(error).name, 0.0)
        if method.startswith(f"{GENERATION_SERVICE.full_name}/"):
            self.metrics.refused(error.reason)

    def counted(
        self,
        service: ServiceDescriptor,
        handlers: Mapping[str, Handler],
        trailer: Callable[[], tuple[str, bytes]] | None = None,
    ) -> dict[str, Handler]:
        """The handlers of `service`, counted by how they end; `trailer` is sent with answers that go well."""
        return {
            name: self._counted(f"{service.full_name}/{name}", handler, trailer) for name, handler in handlers.items()
        }

    def _counted(self, method: str, handler: Handler, trailer: Callable[[], tuple[str, bytes]] | None) -> Handler:
        async def call(request: Message, context: Context) -> Message | None:
            began, code = time.monotonic(), "INTERNAL"
            try:
                answer = await handler(request, context)
                if trailer is not None:
                    context.set_trailing_metadata((trailer(),))
                code = "OK"
                return answer
            except asyncio.CancelledError:
                code = "DEADLINE_EXCEEDED" if is_past_deadline(context) else "CANCELLED"
                raise
            except EngineError as error:
                code = status_of(error).name
                raise
            finally:
                self.metrics.call_ended(method, code, time.monotonic() - began)

        return call
