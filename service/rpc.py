"""The edge of every RPC: bytes to message, handler, and whatever goes wrong to a status.

Everything that a port serves passes here, health, reflection and unknown methods included. Requests are read and parsed
here rather than inside gRPC, which would wait for ever for half a message, and call malformed bytes a fault of ours.
Handlers are coroutines that write by themselves: a cancellation then lands in their own `try`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from engine.contracts.errors import EngineError, UnsupportedOptionError
from service.errors import abort, presentable
from service.refusals import MalformedMessageError, MessageLateError, MessageTooLargeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    from service.arrival import Arrival
    from service.gate import Gate

    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
    # A unary RPC returns its answer; a streaming one writes to the context and returns None.
    # One that takes a stream gets an iterator of messages.
    Handler: TypeAlias = Callable[[Any, Context], Awaitable[Message | None]]
    RawHandler: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[Message | None]]

T = TypeVar("T")

# Converting one megabyte can take the better part of a second, and every stream and probe waits for the loop.
INLINE_BYTES: Final = 64 * 1024


def service_handler(
    descriptor: ServiceDescriptor, handlers: Mapping[str, Handler], gate: Gate, *, name: str = ""
) -> grpc.GenericRpcHandler:
    """Serve every method of `descriptor`, under `name` if it differs; those without a handler are UNIMPLEMENTED."""
    return _Service(name or descriptor.full_name, descriptor, handlers, gate)


def bounded(handlers: Mapping[str, Handler], limit_bytes: int) -> dict[str, Handler]:
    """The handlers; an answer that does not fit into one message of `limit_bytes` is refused with both numbers."""
    return {name: _bounded(handler, limit_bytes) for name, handler in handlers.items()}


def require_sendable(answer_bytes: int, limit_bytes: int) -> None:
    """Refuse an answer of `answer_bytes`, as far as they are known, that does not fit into one message.

    Raises:
        MessageTooLargeError: it does not.
    """
    if answer_bytes > limit_bytes:
        raise MessageTooLargeError(message_bytes=answer_bytes, limit_bytes=limit_bytes)


async def off_loop_if_large(message: Message, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call `function`, on a thread if converting `message` might hold the loop up."""
    if message.ByteSize() <= INLINE_BYTES:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


class _Service(grpc.GenericRpcHandler):
    """The methods of one service, behind its gate."""

    def __init__(self, name: str, descriptor: ServiceDescriptor, handlers: Mapping[str, Handler], gate: Gate) -> None:
        self._name = name
        self._gate = gate
        self._methods = {
            f"/{name}/{method.name}": _method_handler(
                method, handlers.get(method.name) or _unsupported(method.full_name), gate
            )
            for method in descriptor.methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method that is ours; one that refuses, and reads nothing, if the gate says so."""
        handler = self._methods.get(handler_call_details.method)
        if handler is None:
            return None
        try:
            self._gate.require(handler_call_details, self._name)
        except Exception as error:
            return _refusing(presentable(error, None))
        return handler


class UnknownMethods(grpc.GenericRpcHandler):
    """The last resort: whatever no service has is refused by name. Add it after all services."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Refuse the method."""
        name = handler_call_details.method.removeprefix("/").replace("/", ".")
        return _refusing(UnsupportedOptionError(name, "this server has no such method"))


def _refusing(error: EngineError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that ends any call with `error` before its message is read: on the wire all kinds begin alike."""

    async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
        await abort(context, presentable(error, None))

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
    return handler


def _method_handler(method: MethodDescriptor, handler: Handler, gate: Gate) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that begins at the headers of its call: on the wire, one message is a stream of one."""
    build: Any = (
        grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
    )
    built: grpc.RpcMethodHandler[Any, Any] = build(_guarded(method, handler, gate), response_serializer=_serialize)
    return built


def _guarded(method: MethodDescriptor, handler: Handler, gate: Gate) -> RawHandler:
    """Around one handler, inside the gate: out come an answer, a status with details, or its caller's cancellation."""
    request_class = message_factory.GetMessageClass(method.input_type)
    arrival = gate.arrival_of(method.name)

    async def call(_requests: AsyncIterator[bytes], context: Context) -> Message | None:
        request, is_handled = None, False
        try:
            with gate.inside(method.name, context):
                if method.client_streaming:
                    return await handler(_parse_each(request_class, arrival, context), context)
                request = _parse(request_class, await arrival.only_message(context, request_class.DESCRIPTOR.full_name))
                is_handled = True
                return await handler(request, context)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            shown = presentable(error, request)
            if not is_handled and not method.client_streaming:
                gate.refused(f"{method.containing_service.full_name}/{method.name}", shown)
            error.__traceback__ = shown.__traceback__ = None  # it leads to this frame, which holds both
            await abort(context, shown)
            return None

    return call


def _bounded(handler: Handler, limit_bytes: int) -> Handler:
    async def call(request: Message, context: Context) -> Message | None:
        answer = await handler(request, context)
        if answer is not None:
            require_sendable(answer.ByteSize(), limit_bytes)
        return answer

    return call


def _is_cancelled() -> bool:
    """Whether the call itself is cancelled. A cancellation from elsewhere, let out, would leave its caller hanging."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _parse_each(request_class: type[Message], arrival: Arrival, context: Context) -> AsyncIterator[Message]:
    """The messages of a stream; one who sends nothing more for so long has no further questions."""
    request_bytes = await arrival.message(context)
    while request_bytes is not None:
        yield _parse(request_class, request_bytes)
        with contextlib.suppress(MessageLateError):
            request_bytes = None
            request_bytes = await arrival.message(context)


def _parse(request_class: type[Message], request_bytes: bytes) -> Message:
    try:
        return request_class.FromString(request_bytes)
    except DecodeError:
        raise MalformedMessageError(request_class.DESCRIPTOR.full_name) from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _unsupported(full_name: str) -> Handler:
    async def refuse(_request: Message, _context: Context) -> None:
        raise UnsupportedOptionError(full_name, "this build does not offer it yet")

    return refuse
