"""Messages for a fuzzer: any message of a descriptor with values that break things, and bytes that nearly are one."""

from __future__ import annotations

import functools
import random

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies

EXTREME_INTEGERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
DOUBLES = strategies.one_of(
    strategies.floats(width=32), strategies.sampled_from([0.0, -0.0, 1e-308, 1e308, float("nan"), float("inf"), -1.0])
)
TEXTS = strategies.one_of(
    strategies.text(strategies.characters(codec="utf-8"), max_size=12),
    strategies.sampled_from(["", "\0", "../../etc/passwd", "/", "%2e%2e/", "\U0010ffff", "x" * 5000, "user", "tiny"]),
)
MOST_ELEMENTS = 3
MOST_LEVELS = 5


@strategies.composite
def messages(draw: strategies.DrawFn, descriptor: Descriptor, level: int = 0) -> Message:
    """Messages of `descriptor` with any of its fields set."""
    fields = [field for field in descriptor.fields if field.message_type is None or level < MOST_LEVELS]
    chosen = [field for field in fields if draw(strategies.booleans())]
    return filled(descriptor, {field.name: draw(_values(field, level)) for field in chosen})


def filled(descriptor: Descriptor, values: dict[str, object]) -> Message:
    """The message with as much of `values` as its fields can hold; of a oneof the last one stays."""
    message = message_factory.GetMessageClass(descriptor)()
    for name, value in values.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key, element in zip("abc", value, strict=False):  # type: ignore[call-overload]
                getattr(message, name)[key].CopyFrom(element)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


@functools.cache
def _values(field: FieldDescriptor, level: int) -> strategies.SearchStrategy[object]:
    one = _single(field, level)
    return strategies.lists(one, max_size=MOST_ELEMENTS) if field.is_repeated else one


def _single(field: FieldDescriptor, level: int) -> strategies.SearchStrategy[object]:
    if field.message_type is not None:
        entry = field.message_type
        is_map = entry.GetOptions().map_entry
        return messages(entry.fields_by_name["value"].message_type if is_map else entry, level + 1)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return strategies.binary(max_size=12) if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return DOUBLES
        case FieldDescriptor.CPPTYPE_BOOL:
            return strategies.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return strategies.sampled_from([0, 1, 2, 77, -1, 2**31 - 1])
        case kind:
            return strategies.sampled_from([value for value in EXTREME_INTEGERS if _fits(value, kind)])


def _fits(value: int, kind: int) -> bool:
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }[kind]
    return low <= value <= high


def mutated(encoded: bytes, rng: random.Random) -> bytes:
    """`encoded` with a few bytes changed, lost, doubled or put in."""
    data = bytearray(encoded or b"\x00")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at] = rng.choice((0x00, 0x7F, 0x80, 0xFF))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 6))
            case _:
                data += data[at : at + 16]
    return bytes(data)
