"""The messages of load reports, as balancers know them: written down here, since no small package brings them.

Source: gRFC A51, `xds.data.orca.v3.OrcaLoadReport` and `xds.service.orca.v3.OpenRcaService`. They live in a pool of
their own, so that a process that has the published ones too sees no clash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.duration_pb2 import DESCRIPTOR as DURATION

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

_REPORT: Final = ".xds.data.orca.v3.OrcaLoadReport"
_OPTIONAL: Final = FieldDescriptorProto.LABEL_OPTIONAL
_REPEATED: Final = FieldDescriptorProto.LABEL_REPEATED
_DOUBLE: Final = FieldDescriptorProto.TYPE_DOUBLE
_STRING: Final = FieldDescriptorProto.TYPE_STRING
_MESSAGE: Final = FieldDescriptorProto.TYPE_MESSAGE
_DOUBLES: Final = {
    "cpu_utilization": 1,
    "mem_utilization": 2,
    "rps_fractional": 6,
    "eps": 7,
    "application_utilization": 9,
}
_MAPS: Final = {"request_cost": 4, "utilization": 5, "named_metrics": 8}


class OrcaSchema:
    """The service's descriptor, and the class of its reports."""

    def __init__(self) -> None:
        """Build both."""
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(DURATION.serialized_pb)
        pool.AddSerializedFile(_data_file().SerializeToString())
        pool.AddSerializedFile(_service_file().SerializeToString())
        self.service: ServiceDescriptor = pool.FindServiceByName("xds.service.orca.v3.OpenRcaService")
        self._report = message_factory.GetMessageClass(pool.FindMessageTypeByName(_REPORT.removeprefix(".")))

    def report(self, **fields: Any) -> Message:
        """A report with these fields."""
        return self._report(**fields)


def _data_file() -> FileDescriptorProto:
    report = DescriptorProto(name="OrcaLoadReport")
    for name, number in _DOUBLES.items():
        report.field.add(name=name, number=number, label=_OPTIONAL, type=_DOUBLE)
    for name, number in _MAPS.items():
        entry = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        nested = report.nested_type.add(name=entry)
        nested.options.map_entry = True
        nested.field.add(name="key", number=1, label=_OPTIONAL, type=_STRING)
        nested.field.add(name="value", number=2, label=_OPTIONAL, type=_DOUBLE)
        report.field.add(name=name, number=number, label=_REPEATED, type=_MESSAGE, type_name=f"{_REPORT}.{entry}")
    return FileDescriptorProto(
        name="xds/data/orca/v3/orca_load_report.proto",
        package="xds.data.orca.v3",
        syntax="proto3",
        message_type=[report],
    )


def _service_file() -> FileDescriptorProto:
    request = DescriptorProto(name="OrcaLoadReportRequest")
    request.field.add(
        name="report_interval", number=1, label=_OPTIONAL, type=_MESSAGE, type_name=".google.protobuf.Duration"
    )
    request.field.add(name="request_cost_names", number=2, label=_REPEATED, type=_STRING)
    file = FileDescriptorProto(
        name="xds/service/orca/v3/orca.proto",
        package="xds.service.orca.v3",
        syntax="proto3",
        dependency=["xds/data/orca/v3/orca_load_report.proto", DURATION.name],
        message_type=[request],
    )
    service = file.service.add(name="OpenRcaService")
    service.method.add(
        name="StreamCoreMetrics",
        input_type=".xds.service.orca.v3.OrcaLoadReportRequest",
        output_type=_REPORT,
        server_streaming=True,
    )
    return file
