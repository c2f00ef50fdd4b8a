"""Server reflection, v1 and v1alpha: tools can list and call everything without our files.

The two versions are the same messages under two package names; the library implements v1alpha alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor_pool import DescriptorPool

ALPHA_PACKAGE: Final = "grpc.reflection.v1alpha"
PACKAGE: Final = "grpc.reflection.v1"
SERVICE: Final = "ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Describe `service_names`, and reflection itself, on `server`."""
    names = (*service_names, f"{PACKAGE}.{SERVICE}", f"{ALPHA_PACKAGE}.{SERVICE}")
    servicer = reflection.aio.ReflectionServicer(names, pool=_pool())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for package in (PACKAGE, ALPHA_PACKAGE):
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{package}.{SERVICE}", methods),))


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
