"""GenerationService: one coroutine per call, which frees its row however it ends.

A call that is cancelled lands in `freed_on_exit`, whose clean-up is synchronous: it raises the abort signal and
lets the cancellation go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import EngineError, InvalidRequestError
from engine.contracts.events import GenerationFinished, GenerationStarted, TokensGenerated
from engine.contracts.results import FinishReason
from mlxstream.v1 import event_pb2, generation_pb2
from service.deadline import PartialDeadline
from service.decode import decode_generation
from service.decode_delivery import decode_delivery
from service.durable.call import DurableCall
from service.encode import encode_finished, encode_started, encode_stats, encode_tokens
from service.errors import encode_error, presentable
from service.limits import RequestLimits
from service.live import CallFacts
from service.metadata import priority_of, session_of
from service.rpc import off_loop_if_large, require_sendable
from service.stream import ResponseStream, SentBefore
from service.tracing import operation_of, trace_of, traced_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from google.protobuf.message import Message

    from engine.contracts.events import GenerationEvent, GenerationRequest
    from engine.execution.engine import Engine, Generation
    from service.access import Access
    from service.decode import GenerationMessage
    from service.delivery import Delivery
    from service.durable.generation import Attachment
    from service.durable.generations import DurableGenerations
    from service.durable.reader import LogEvent, LogReader
    from service.live import LiveGenerations
    from service.measures import Measures
    from service.rpc import Context, Handler

    # What a stream is read from: the generation itself, or the log of a durable one.
    Source: TypeAlias = Generation | LogReader

# A call that is cancelled this close to its deadline was ended by it: the caller's clock may run ahead of ours.
DEADLINE_TOLERANCE_SECONDS: Final = 0.05


class GenerationHandlers:
    """Answers `mlxstream.v1.GenerationService`."""

    def __init__(
        self,
        engine: Engine,
        live: LiveGenerations,
        access: Access,
        limits: RequestLimits,
        durable: DurableGenerations,
        metrics: Measures | None = None,
    ) -> None:
        """Generations run on `engine`, and are followed to their end by `live`; `durable` holds those that may wait.

        `access` knows whose they are, `limits` bounds what they may ask for, and `metrics` hears what is refused.
        """
        self._engine = engine
        self._live = live
        self._access = access
        self._limits = limits
        self._durable = durable
        self._metrics = metrics

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC; the others are refused."""
        return {"Generate": self.generate, "Complete": self.complete, "Resume": self.resume, "Abort": self.abort}

    async def generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Stream one generation."""
        delivery = self._delivery(request, streaming=True)
        deadline = PartialDeadline.of(context, delivery, self._engine.step_seconds)
        if delivery.durable:
            attachment = await self._attached(request, delivery, context)
            return await self._relay_durable(attachment, request, context, deadline)
        generation = await self._accept(request, context)
        stream = ResponseStream(context.write, delivery, asyncio.get_running_loop().time, self._metrics)
        with freed_on_exit(generation, context), deadline.ending(generation):
            finished = await relay(generation, stream)
            error = ending_error(finished, request, partial=delivery.partial_at_deadline and stream.started)
            await stream.finish(finished, encode_error(error) if error is not None else None)
        if error is not None:
            raise error
        return None

    async def resume(self, request: generation_pb2.ResumeRequest, context: Context) -> None:
        """Stream a durable generation on from a point."""
        caller = self._access.caller_of(context).name
        with self._counting_refusals(), self._counting_resumes():
            attachment = await self._durable.resume(caller, request.generation_id, request.after_sequence)
        deadline = PartialDeadline.of(context, attachment.delivery, self._engine.step_seconds)
        await self._relay_durable(attachment, request, context, deadline)

    async def _relay_durable(
        self,
        attachment: Attachment,
        request: generation_pb2.GenerateRequest | generation_pb2.ResumeRequest,
        context: Context,
        deadline: PartialDeadline,
    ) -> None:
        """Stream what `attachment` reads. The generation outlives this call."""
        stream = ResponseStream(
            context.write,
            attachment.delivery,
            asyncio.get_running_loop().time,
            self._metrics,
            after_sequence=attachment.after_sequence,
            record=attachment.record,
        )
        with attachment.held(), deadline.ending(attachment):
            finished = await relay(attachment.reader, stream)
            partial = attachment.delivery.partial_at_deadline and stream.started
            error = ending_error(finished, request, partial=partial)
            await stream.finish(finished, encode_error(error) if error is not None else None)
            attachment.deliver()
        if error is not None:
            raise error

    async def complete(
        self, request: generation_pb2.CompleteRequest, context: Context
    ) -> generation_pb2.CompleteResponse:
        """Run one generation to its end and answer with all of it."""
        delivery = self._delivery(request, streaming=False)
        deadline = PartialDeadline.of(context, delivery, self._engine.step_seconds)
        answer, limit_bytes = generation_pb2.CompleteResponse(), self._limits.max_answer_bytes
        if delivery.durable:
            attachment = await self._attached(request, delivery, context)
            with attachment.held(), deadline.ending(attachment):
                finished = await collect(attachment.reader, answer, delivery, lambda: accepted(context), limit_bytes)
                attachment.deliver()
        else:
            generation = await self._accept(request, context)
            with freed_on_exit(generation, context), deadline.ending(generation):
                finished = await collect(generation, answer, delivery, lambda: accepted(context), limit_bytes)
        partial = delivery.partial_at_deadline and answer.HasField("started")
        error = ending_error(finished, request, partial=partial)
        if error is not None:
            raise error
        return answer

    async def abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """End a generation of the caller's, and answer once it has ended."""
        caller = self._access.caller_of(context).name
        match request.WhichOneof("target"):
            case "request_id":
                generation = self._engine.abort(caller=caller, request_id=request.request_id)
            case "generation_id":
                generation = self._engine.abort(caller=caller, generation_id=request.generation_id)
            case _:
                raise InvalidRequestError.of("target", "one of request_id and generation_id must be set")
        if generation is None:
            ended = await self._durable.forget(caller, request.generation_id)
            return generation_pb2.AbortResponse(
                status=generation_pb2.ABORT_STATUS_NOT_RUNNING,
                stats=encode_stats(ended.stats) if ended is not None else None,
            )
        finished = await generation.finished()
        aborted = finished.finish_reason is FinishReason.CANCELLED
        return generation_pb2.AbortResponse(
            status=generation_pb2.ABORT_STATUS_ABORTED if aborted else generation_pb2.ABORT_STATUS_NOT_RUNNING,
            stats=encode_stats(finished.stats),
        )

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if self._metrics is not None:
                self._metrics.refused(error.reason)
            raise

    async def _accept(self, request: GenerationMessage, context: Context) -> Generation:
        with self._counting_refusals():
            decoded = await self._decoded(request, context)
            facts = self._facts(request, context)  # may raise, and so comes before there is a row
            self._live.require_open()
            generation = await self._engine.generate(decoded, require_open=self._live.require_open)
            self._live.watch(generation, facts)
            return generation

    async def _attached(self, request: GenerationMessage, delivery: Delivery, context: Context) -> Attachment:
        with self._counting_refusals():
            decoded = await self._decoded(request, context)
            facts = self._facts(request, context)
            return await self._durable.generate(
                DurableCall(message=request, request=decoded, delivery=delivery, facts=facts)
            )

    def _delivery(self, request: GenerationMessage, *, streaming: bool) -> Delivery:
        with self._counting_refusals():
            return decode_delivery(request.delivery, streaming=streaming)

    @contextlib.contextmanager
    def _counting_resumes(self) -> Iterator[None]:
        """Tell the metrics whether what a call wants to go on with was there."""
        hit = False
        try:
            yield
            hit = True
        finally:
            if self._metrics is not None:
                self._metrics.resumed(hit=hit)

    def _facts(self, request: GenerationMessage, context: Context) -> CallFacts:
        """What telemetry wants to know of the call that asks for a generation."""
        return CallFacts(
            caller=self._access.caller_of(context).name,
            operation=operation_of(request),
            trace=trace_of(context),
            options=traced_options(request.options),
            looks_up_prefixes=not request.options.cache.bypass,
        )

    async def _decoded(self, request: GenerationMessage, context: Context) -> GenerationRequest:
        caller, priority, session = self._access.caller_of(context), priority_of(context), session_of(context)
        self._limits.check_options(request.options)
        bounds = {
            "max_prompt_tokens": self._limits.prompt_tokens_of(caller),
            "deadline_seconds": context.time_remaining(),
        }
        decoded = await off_loop_if_large(
            request, decode_generation, request, caller=caller.name, priority=priority, **bounds
        )
        return within_session(decoded, session)


def within_session(request: GenerationRequest, session: str) -> GenerationRequest:
    """`request` as part of `session` ("" for none), unless it names one itself."""
    if not session or request.options.cache_session_id is not None:
        return request
    return replace(request, options=replace(request.options, cache_session_id=session))


async def relay(generation: Source, stream: ResponseStream) -> GenerationFinished:
    """Send events as they come, and what falls due between them, until the end, which is returned."""
    while True:
        if stream.due_at is not None:
            await stream.send_due()
        event = await next_event_before(generation, stream.due_at)
        if isinstance(event, GenerationFinished):
            return event
        if event is not None:
            await stream.handle(event)


async def accepted(context: Context) -> None:
    """Tell the caller that its request runs: gRPC's clients repeat no call whose headers have come."""
    await context.send_initial_metadata(())


async def collect(
    generation: Source,
    answer: generation_pb2.CompleteResponse,
    delivery: Delivery,
    when_started: Callable[[], Awaitable[None]],
    limit_bytes: int,
) -> GenerationFinished:
    """Gather all events in `answer` until the end, which is returned.

    Raises:
        MessageTooLargeError: it is clear that the answer will have more than `limit_bytes`; nothing is worth finishing.
    """
    text: list[str] = []
    answer_bytes = 0
    while True:
        match await generation.next_event():
            case GenerationStarted() as started:
                answer.started.CopyFrom(encode_started(started))
                await when_started()
            case event_pb2.Started() as started:
                answer.started.CopyFrom(started)
                await when_started()
            case (TokensGenerated() as generated) | SentBefore(generated):
                tokens = encode_tokens(generated.tokens, with_bytes=delivery.include_token_bytes)
                kept_text = generated.text if delivery.include_text else ""
                answer_bytes += sum(token.ByteSize() for token in tokens) + len(kept_text)
                require_sendable(answer_bytes, limit_bytes)
                answer.tokens.extend(tokens)
                text.append(kept_text)
            case GenerationFinished() as finished:
                answer.text = "".join(text)
                with_cache_tokens = delivery.include_cache_tokens
                answer.finished.CopyFrom(encode_finished(finished, None, with_cache_tokens=with_cache_tokens))
                require_sendable(answer.ByteSize(), limit_bytes)
                return finished


async def next_event_before(generation: Source, time: float | None) -> LogEvent | GenerationEvent | None:
    """The next event, or None once the loop's clock has reached `time`. No event is lost."""
    if time is None:
        return await generation.next_event()
    try:
        async with asyncio.timeout_at(time):
            return await generation.next_event()
    except TimeoutError:
        return None


def ending_error(finished: GenerationFinished, request: Message, *, partial: bool) -> EngineError | None:
    """What the call's status must tell; None ends it with OK, which `partial` allows at the deadline too."""
    if finished.error is None or (partial and finished.finish_reason is FinishReason.DEADLINE):
        return None
    return presentable(finished.error, request)


@contextlib.contextmanager
def freed_on_exit(generation: Generation, context: Context) -> Iterator[None]:
    """Abort `generation` when its call ends before it does."""
    try:
        yield
    except BaseException:
        generation.abort(_cause(context))
        raise


def is_past_deadline(context: Context) -> bool:
    """Whether a call that was cancelled was ended by its deadline."""
    remaining_seconds = context.time_remaining()
    return remaining_seconds is not None and remaining_seconds <= DEADLINE_TOLERANCE_SECONDS


def _cause(context: Context) -> AbortReason:
    return AbortReason.DEADLINE if is_past_deadline(context) else AbortReason.DISCONNECTED
