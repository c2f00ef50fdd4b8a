"""Values that no request may hold, whatever they mean: too many, not finite, unknown to this build, no duration.

A message is walked before anything is built from it. Counts come first, so that a refused list is never read.
"""

from __future__ import annotations

import itertools
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.unknown_fields import UnknownFieldSet

from engine.contracts.curve_points import MAX_CURVE_POINTS
from engine.contracts.errors import MAX_VIOLATIONS, FieldViolation, InvalidRequestError
from engine.contracts.option_groups import MAX_CHOICES
from engine.contracts.options import (
    MAX_ADAPTERS,
    MAX_LOGIT_BIASES,
    MAX_PROTECTED_IDS,
    MAX_STOP_SEQUENCES,
    MAX_TOKEN_IDS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

    from google.protobuf.message import Message

MAX_DURATION_SECONDS: Final = 315_576_000_000
NANOS_PER_SECOND: Final = 10**9

# Most elements of each repeated field of a request, by its full name in the schema, whose comments repeat them.
MAX_ELEMENTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "mlxstream.v1.TokenPrompt.ids": 4_194_304,
        "mlxstream.v1.DetokenizeRequest.ids": 1_048_576,
        "mlxstream.v1.ChatPrompt.messages": 16_384,
        "mlxstream.v1.ChatPrompt.tools": 1_024,
        "mlxstream.v1.ChatMessage.content": 1_024,
        "mlxstream.v1.TokenIds.ids": MAX_TOKEN_IDS,
        "mlxstream.v1.ChoiceConstraint.choices": MAX_CHOICES,
        "mlxstream.v1.GenerateOptions.stop_sequences": MAX_STOP_SEQUENCES,
        "mlxstream.v1.GenerateOptions.xtc_special_tokens": MAX_PROTECTED_IDS,
        "mlxstream.v1.GenerateOptions.curve": MAX_CURVE_POINTS,
        "mlxstream.v1.GenerateOptions.logit_bias": MAX_LOGIT_BIASES,
        "mlxstream.v1.GenerateOptions.adapters": MAX_ADAPTERS,
    }
)
_FLOATING: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def refuse_bad_values(message: Message, path: str) -> None:
    """Raise `InvalidRequestError` with the first few bad values below `message`, which stands at `path`."""
    found = list(itertools.islice(_violations(message, path), MAX_VIOLATIONS))
    if found:
        raise InvalidRequestError(found)


def require_few(message: Message, name: str, path: str) -> None:
    """Refuse more elements of the repeated field `name` than `MAX_ELEMENTS` allows, before any is read."""
    field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
    found = _count_violation(getattr(message, name), field, path)
    if found is not None:
        raise InvalidRequestError([found])


def nanoseconds(duration: Duration) -> int:
    """The duration as a whole number, which keeps all its digits."""
    return duration.seconds * NANOS_PER_SECOND + duration.nanos


def shown(duration: Duration) -> str:
    """The duration for people, with all its digits."""
    total = nanoseconds(duration)
    seconds, nanos = divmod(abs(total), NANOS_PER_SECOND)
    digits = f"{seconds}.{nanos:09}".rstrip("0").rstrip(".")
    return f"{'-' if total < 0 else ''}{digits} s"


def _violations(message: Message, path: str) -> Iterator[FieldViolation]:
    if isinstance(message, Duration):
        yield from _duration_violations(message, path)
        return
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield FieldViolation(path, f"field number {unknown[index].field_number} is not known to this server")
    for field, value in message.ListFields():
        if not _is_harmless(field, value):
            yield from _field_violations(field, value, f"{path}.{field.name}")


def _is_harmless(field: FieldDescriptor, value: Any) -> bool:
    """Whether one look at the value shows that nothing can be wrong: long lists are made of such."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | bytes) or (isinstance(value, int) and field.enum_type is None)


def _field_violations(field: FieldDescriptor, value: Any, path: str) -> Iterator[FieldViolation]:
    if not field.is_repeated:
        yield from _value_violations(field, value, path)
    elif (too_many := _count_violation(value, field, path)) is not None:
        yield too_many
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        for index, element in enumerate(value):
            yield from _violations(element, f"{path}[{index}]")


def _value_violations(field: FieldDescriptor, value: Any, path: str) -> Iterator[FieldViolation]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        yield from _violations(value, path)
    elif field.cpp_type in _FLOATING and not math.isfinite(value):
        yield FieldViolation(path, f"must be a finite number, got {value}")
    elif field.enum_type is not None and value not in field.enum_type.values_by_number:
        yield FieldViolation(path, f"{value} is no value of {field.enum_type.name} that this server knows")


def _duration_violations(duration: Duration, path: str) -> Iterator[FieldViolation]:
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= NANOS_PER_SECOND:
        yield FieldViolation(path, f"nanos must be within ±999999999, got {nanos}")
    elif abs(seconds) > MAX_DURATION_SECONDS:
        yield FieldViolation(path, f"seconds must be within ±{MAX_DURATION_SECONDS}, got {seconds}")
    elif seconds * nanos < 0:
        yield FieldViolation(path, f"seconds and nanos must have the same sign, got {seconds} and {nanos}")


def _count_violation(elements: Sized, field: FieldDescriptor, path: str) -> FieldViolation | None:
    limit = MAX_ELEMENTS[field.full_name]
    if len(elements) <= limit:
        return None
    return FieldViolation(path, f"at most {limit} are allowed, got {len(elements)}")
