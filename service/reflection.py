"""Server reflection, v1 and v1alpha: tools can list and call everything without our files.

The two versions are the same messages under two package names; the library implements v1alpha alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service.rpc import service_handler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import grpc
    from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
    from google.protobuf.descriptor_pool import DescriptorPool

    from service.gate import Gate
    from service.rpc import Context

ALPHA_PACKAGE: Final = "grpc.reflection.v1alpha"
PACKAGE: Final = "grpc.reflection.v1"
SERVICE: Final = "ServerReflection"
ALPHA_SERVICE: Final = cast("ServiceDescriptor", reflection_pb2.DESCRIPTOR.services_by_name[SERVICE])


def reflection_handlers(service_names: Iterable[str], gate: Gate) -> tuple[grpc.GenericRpcHandler, ...]:
    """Describe `service_names`, and reflection itself, in both versions."""
    own_names = tuple(f"{package}.{SERVICE}" for package in (PACKAGE, ALPHA_PACKAGE))
    symbols: Any = Symbols(_pool())
    servicer: Any = reflection.aio.ReflectionServicer((*service_names, *own_names), pool=symbols)

    async def info(requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Context) -> None:
        async for answer in servicer.ServerReflectionInfo(requests, context):
            await context.write(answer)

    return tuple(service_handler(ALPHA_SERVICE, {"ServerReflectionInfo": info}, gate, name=name) for name in own_names)


class Symbols:
    """What the library asks a pool for. Methods are symbols too, as ghz and the protocol have it; pools know none."""

    def __init__(self, pool: DescriptorPool) -> None:
        """Answers from `pool`."""
        self.FindFileByName = pool.FindFileByName
        self.FindMessageTypeByName = pool.FindMessageTypeByName
        self.FindExtensionByNumber = pool.FindExtensionByNumber
        self.FindAllExtensions = pool.FindAllExtensions
        self._pool = pool

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 - the name is protobuf's
        """The file that defines `symbol`; raises `KeyError` when none does."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def _pool() -> DescriptorPool:
    """The process's descriptors, v1 among them, so that it can be described too."""
    pool = descriptor_pool.Default()
    pool.Add(_renamed(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)))
    return pool


def _renamed(file: FileDescriptorProto) -> FileDescriptorProto:
    """The file under its v1 name. `file` is changed in place."""
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = PACKAGE
    for field in (field for message in file.message_type for field in message.field if field.type_name):
        field.type_name = field.type_name.replace(ALPHA_PACKAGE, PACKAGE)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(ALPHA_PACKAGE, PACKAGE)
        method.output_type = method.output_type.replace(ALPHA_PACKAGE, PACKAGE)
    return file
