"""Decoding loses nothing: every field of a request changes what the engine is asked, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from engine.contracts.errors import EngineError, InvalidRequestError, UnsupportedOptionError
from engine.contracts.hlg import HlgParametric
from engine.contracts.option_groups import AdapterSelection, Constraint
from engine.contracts.prompt import ChatMessage, ChatPrompt, ImagePart, TextPart, TokenPrompt
from mlxstream.v1 import generation_pb2, model_pb2, options_pb2
from service.decode import decode_chat, decode_generation
from service.decode_delivery import decode_delivery

# A field that cannot stand alone, and what it is added to.
TEXT: dict[str, Any] = {"text": {"text": "hi"}}
FOUNDATIONS: dict[str, dict[str, Any]] = {
    "options.curve": TEXT | {"options": {"curve": [{"x_percent": 1, "y_percent": 1}, {"x_percent": 100}]}},
    "options.adapters.scale": TEXT | {"options": {"adapters": [{"id": "a"}]}},
    "chat": {"chat": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}},
    "tokens": {"tokens": {"ids": [1]}},
}
# Members of well-known types carry no meaning of their own: their parents are walked instead.
LEAF_TYPES = {"google.protobuf.Struct", "google.protobuf.Duration"}
# Whole ranges are checked elsewhere; here each number must only be valid and differ from its default.
VALUES: dict[str, Any] = {"xtc_threshold": 0.25, "t_min": 0.25, "lw": 100.0, "deadline_policy": 2}

Path = tuple[FieldDescriptor, ...]


def leaves(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Every field below `descriptor` that holds a value rather than further fields."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.full_name not in LEAF_TYPES and inner.fields:
            yield from leaves(inner, (*above, field))
        else:
            yield (*above, field)


def named(path: Path) -> str:
    return ".".join(field.name for field in path)


def set_leaf(message: Message, path: Path) -> None:
    """Give the field at the end of `path` a value that is not its default."""
    for field in path[:-1]:
        inner = getattr(message, field.name)
        if field.is_repeated:
            message = inner[0] if inner else inner.add()
        else:
            inner.SetInParent()
            message = inner
    field = path[-1]
    if field.message_type is not None:
        set_message(getattr(message, field.name), field)
        return
    value = VALUES.get(field.name, example(field))
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def set_message(value: Any, field: FieldDescriptor) -> None:
    target = value.add() if field.is_repeated else value
    match field.message_type.full_name:
        case "google.protobuf.Struct":
            target.update({"key": 1})
        case "google.protobuf.Duration":
            target.FromSeconds(3)
        case _:
            target.SetInParent()


def example(field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x"
        case FieldDescriptor.CPPTYPE_BOOL:
            # A default of true is only left by false.
            return field.name not in {"include_text", "add_generation_prompt"}
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[-1].number
        case _:
            return 3


def asked(request: Any) -> object:
    """Everything that the request makes the engine and the stream do, or the refusal."""
    streaming = isinstance(request, generation_pb2.GenerateRequest)
    try:
        return decode_generation(request, caller=""), decode_delivery(request.delivery, streaming=streaming)
    except EngineError as error:
        return error


def paths_of(descriptor: Descriptor) -> list[Any]:
    return [pytest.param(path, id=named(path)) for path in leaves(descriptor)]


@pytest.mark.parametrize("path", paths_of(generation_pb2.GenerateRequest.DESCRIPTOR))
@pytest.mark.parametrize("request_class", [generation_pb2.GenerateRequest, generation_pb2.CompleteRequest])
def test_every_field_is_carried_over_or_refused_by_name(request_class: Any, path: Path) -> None:
    foundation = next((found for name, found in FOUNDATIONS.items() if named(path).startswith(name)), TEXT)
    plain, changed = request_class(**foundation), request_class(**foundation)
    set_leaf(changed, path)
    before, after = asked(plain), asked(changed)
    assert not isinstance(before, EngineError)
    if isinstance(after, EngineError):
        assert isinstance(after, UnsupportedOptionError | InvalidRequestError)
        assert path[0].name == "delivery"
        assert path[-1].name in str(after)
    else:
        assert after != before


def test_the_walk_sees_the_whole_request() -> None:
    names = {named(path) for path in leaves(generation_pb2.GenerateRequest.DESCRIPTOR)}
    assert len(names) > 90
    assert {"request_id", "options.seed", "options.hlg.shaper.x_m", "chat.messages.content.image"} <= names


def test_complete_has_the_fields_of_generate_under_the_same_numbers() -> None:
    def shape(descriptor: Descriptor) -> list[tuple[str, int, Any]]:
        return [(field.name, field.number, field.message_type) for field in descriptor.fields]

    assert shape(generation_pb2.CompleteRequest.DESCRIPTOR) == shape(generation_pb2.GenerateRequest.DESCRIPTOR)


def test_what_is_unset_stays_unset() -> None:
    options = decode_generation(generation_pb2.GenerateRequest(text={"text": "hi"}), caller="me").options
    unset = {name: getattr(options, name) for name in type(options).__slots__}
    assert {name: value for name, value in unset.items() if value not in (None, ())} == {}


def test_a_zero_that_was_set_differs_from_unset() -> None:
    options = options_pb2.GenerateOptions(temperature=0, top_p=0, top_k=0, seed=0, top_logprobs=0, logprobs=False)
    options.eos_token_ids.SetInParent()
    decoded = decode_generation(generation_pb2.GenerateRequest(text={"text": "hi"}, options=options), caller="").options
    assert (decoded.temperature, decoded.top_p, decoded.top_k, decoded.seed) == (0, 0, 0, 0)
    assert (decoded.top_logprobs, decoded.logprobs, decoded.eos_token_ids) == (0, False, ())


def test_numbers_keep_their_full_width() -> None:
    options = {"seed": 2**64 - 1, "max_tokens": 2**32 - 1, "temperature": 0.7, "logit_bias": [{"token": 2**32 - 1}]}
    decoded = decode_generation(generation_pb2.GenerateRequest(tokens={"ids": [2**32 - 1]}, options=options), caller="")
    assert decoded.prompt == TokenPrompt((2**32 - 1,))
    assert (decoded.options.seed, decoded.options.max_tokens) == (2**64 - 1, 2**32 - 1)
    assert (decoded.options.temperature, decoded.options.logit_bias) == (0.7, ((2**32 - 1, 0.0),))


def test_messages_inside_options_are_decoded_in_full() -> None:
    options = options_pb2.GenerateOptions(
        adapters=[{"id": "b"}, {"id": "a", "scale": 0.0}],
        choice={"choices": ["yes", "no"]},
        hlg={"parametric": {"gain": 0.0, "pivot": options_pb2.HLG_PIVOT_MEDIAN}},
    )
    decoded = decode_generation(generation_pb2.GenerateRequest(text={"text": "hi"}, options=options), caller="").options
    assert decoded.adapters == (AdapterSelection(id="b"), AdapterSelection(id="a", scale=0.0))
    assert decoded.constraint == Constraint(kind="choice", choices=("yes", "no"))
    assert decoded.hlg == HlgParametric(gain=0.0, pivot="median")


def test_a_conversation_is_decoded_in_full() -> None:
    request = model_pb2.RenderChatRequest(
        chat={
            "messages": [{"role": "user", "content": [{"text": "look: "}, {"image": b"png"}]}, {"role": "assistant"}],
            "add_generation_prompt": False,
            "enable_thinking": False,
        }
    )
    request.chat.tools.add().update({"name": "f", "limits": {"max": 3, "ratio": 0.5, "any": [None, True, "s"]}})
    request.chat.template_variables.update({"date": "today"})
    assert decode_chat(request.chat) == ChatPrompt(
        messages=(
            ChatMessage("user", (TextPart("look: "), ImagePart(b"png"))),
            ChatMessage("assistant", ()),
        ),
        tools=({"name": "f", "limits": {"max": 3, "ratio": 0.5, "any": [None, True, "s"]}},),
        add_generation_prompt=False,
        enable_thinking=False,
        template_variables={"date": "today"},
    )


def test_whole_numbers_of_a_tool_are_integers_again() -> None:
    request = model_pb2.RenderChatRequest(chat={"messages": [{"role": "user"}]})
    request.chat.tools.add().update({"minimum": 3, "huge": 2.0**70})
    (tool,) = decode_chat(request.chat).tools
    assert (type(tool["minimum"]), type(tool["huge"])) == (int, float)
