"""The edge of every RPC: bytes to message, handler, and whatever goes wrong to a status.

Everything that a port serves passes here, health, reflection and unknown methods included. Requests are parsed here
rather than inside gRPC, which would answer malformed bytes as a fault of ours.
Handlers are coroutines that write by themselves: a cancellation then lands in their own `try`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from engine.contracts.errors import UnsupportedOptionError
from service.errors import MalformedMessageError, MessageTooLargeError, abort, presentable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
    # A unary RPC returns its answer; a streaming one writes to the context and returns None.
    # One that takes a stream gets an iterator of messages.
    Handler: TypeAlias = Callable[[Any, Context], Awaitable[Message | None]]
    RawHandler: TypeAlias = Callable[[Any, Context], Awaitable[Message | None]]

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Converting one megabyte can take the better part of a second, and every stream and probe waits for the loop.
INLINE_BYTES: Final = 64 * 1024


def service_handler(
    descriptor: ServiceDescriptor, handlers: Mapping[str, Handler], *, name: str = ""
) -> grpc.GenericRpcHandler:
    """Serve every method of `descriptor`, under `name` if it differs; those without a handler are UNIMPLEMENTED."""
    methods = {method.name: _method_handler(method, handlers) for method in descriptor.methods}
    return grpc.method_handlers_generic_handler(name or descriptor.full_name, methods)


async def off_loop_if_large(message: Message, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call `function`, on a thread if converting `message` might hold the loop up."""
    if message.ByteSize() <= INLINE_BYTES:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


class UnknownMethods(grpc.GenericRpcHandler):
    """The last resort: whatever no service has is refused by name. Add it after all services."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Refuse the method, whatever it streams: on the wire all kinds begin alike."""
        name = handler_call_details.method.removeprefix("/").replace("/", ".")

        async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
            await abort(context, UnsupportedOptionError(name, "this server has no such method"))

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
        return handler


def _method_handler(method: MethodDescriptor, handlers: Mapping[str, Handler]) -> grpc.RpcMethodHandler[Any, Any]:
    raw = _guarded(method, handlers.get(method.name) or _unsupported(method.full_name))
    build: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    handler: grpc.RpcMethodHandler[Any, Any] = build(raw, response_serializer=_serialize)
    return handler


def _guarded(method: MethodDescriptor, handler: Handler) -> RawHandler:
    """Around one handler: nothing leaves it but an answer, a status with details, or a cancellation."""
    request_class = message_factory.GetMessageClass(method.input_type)

    async def call(raw: Any, context: Context) -> Message | None:
        request = None
        try:
            if method.client_streaming:
                return await handler(_parse_each(request_class, raw), context)
            request = _parse(request_class, raw)
            answer = await handler(request, context)
            if answer is not None:
                _require_sendable(answer)
            return answer
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort(context, presentable(error, request))

    return call


async def _parse_each(request_class: type[Message], raw: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for request_bytes in raw:
        yield _parse(request_class, request_bytes)


def _parse(request_class: type[Message], request_bytes: bytes) -> Message:
    try:
        return request_class.FromString(request_bytes)
    except DecodeError:
        raise MalformedMessageError(request_class.DESCRIPTOR.full_name) from None


def _require_sendable(answer: Message) -> None:
    size_bytes = answer.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(message_bytes=size_bytes, limit_bytes=MAX_MESSAGE_BYTES)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _unsupported(full_name: str) -> Handler:
    async def refuse(_request: Message, _context: Context) -> None:
        raise UnsupportedOptionError(full_name, "this build does not offer it yet")

    return refuse
