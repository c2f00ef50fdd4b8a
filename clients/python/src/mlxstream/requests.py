"""Builds the schema's messages from plain Python values: prompts by their type, options by their name.

The names are read from the schema itself, so an option exists here as soon as it exists there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from mlxstream.v1.delivery_pb2 import DeliveryOptions
from mlxstream.v1.generation_pb2 import CompleteRequest, GenerateRequest
from mlxstream.v1.options_pb2 import GenerateOptions
from mlxstream.v1.prompt_pb2 import ChatMessage, ChatPrompt, ContentPart, TextPrompt, TokenPrompt

Messages = Sequence[Mapping[str, Any]] | Mapping[str, Any] | ChatPrompt
Prompt = str | Sequence[int] | TextPrompt | TokenPrompt | Messages
GenerationRequest = TypeVar("GenerationRequest", GenerateRequest, CompleteRequest)
AnyMessage = TypeVar("AnyMessage", bound=Message)
MESSAGE_KEYS = ("role", "content")


def generation_request(
    kind: type[GenerationRequest],
    prompt: Prompt,
    options: Mapping[str, Any],
    *,
    delivery: Mapping[str, Any] | DeliveryOptions | None,
    model: str,
    request_id: str,
) -> GenerationRequest:
    """Build a request of `kind`.

    Raises:
        TypeError: An option has an unknown name or a value of the wrong type.
        ValueError: A value does not fit its field.
    """
    request = kind(model=model, request_id=request_id)
    converted = prompt_message(prompt)
    if isinstance(converted, TextPrompt):
        request.text.CopyFrom(converted)
    elif isinstance(converted, TokenPrompt):
        request.tokens.CopyFrom(converted)
    else:
        request.chat.CopyFrom(converted)
    if options:
        request.options.CopyFrom(filled(GenerateOptions(), options, "option"))
    if isinstance(delivery, DeliveryOptions):
        request.delivery.CopyFrom(delivery)
    elif delivery:
        request.delivery.CopyFrom(filled(DeliveryOptions(), delivery, "delivery option"))
    return request


def prompt_message(prompt: Prompt) -> TextPrompt | TokenPrompt | ChatPrompt:
    """A string is raw text, a sequence of integers token ids, a sequence of messages a conversation."""
    if isinstance(prompt, TextPrompt | TokenPrompt):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if isinstance(prompt, ChatPrompt | Mapping):
        return chat_prompt(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(f"a prompt is text, a list of token ids or a list of messages, not {_kind(prompt)}")
    if any(isinstance(item, Mapping) for item in prompt):
        return chat_prompt(cast("Messages", prompt))
    return TokenPrompt(ids=cast("Sequence[int]", prompt))


def chat_prompt(messages: Messages) -> ChatPrompt:
    """A conversation, from its messages or from a mapping `{"messages": …, "tools": …, "enable_thinking": …}`."""
    if isinstance(messages, ChatPrompt):
        return messages
    settings = messages if isinstance(messages, Mapping) else {"messages": messages}
    turns = settings.get("messages", ())
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise TypeError(f"the messages of a conversation are a list, not {_kind(turns)}")
    turns = [chat_message(turn) for turn in turns]
    return filled(ChatPrompt(), {**settings, "messages": turns}, "prompt field")


def chat_message(message: Mapping[str, Any]) -> ChatMessage:
    """Build a turn from `{"role": …, "content": …}`; the content is text, image bytes, or a list of both."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a mapping with a role and a content, not {_kind(message)}")
    for key in message:
        if key not in MESSAGE_KEYS:
            raise TypeError(f"unknown key {key!r} in a message" + _close_to(str(key), MESSAGE_KEYS))
    for key in MESSAGE_KEYS:
        if key not in message:
            raise TypeError(f"a message lacks its {key!r}")
    content = message["content"]
    pieces = content if isinstance(content, list | tuple) else [content]
    return ChatMessage(role=message["role"], content=[_content_part(piece) for piece in pieces])


def _content_part(piece: object) -> ContentPart:
    if isinstance(piece, ContentPart):
        return piece
    if isinstance(piece, str):
        return ContentPart(text=piece)
    if isinstance(piece, bytes):
        return ContentPart(image=piece)
    raise TypeError(f"the content of a message is text, image bytes, or a list of both, not {_kind(piece)}")


def filled(message: AnyMessage, values: Mapping[str, Any], what: str) -> AnyMessage:
    """Set the fields of `message` by name; None leaves one unset. `what` names them in errors."""
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        if name not in fields:
            raise TypeError(f"unknown {what} {name!r}" + _close_to(name, fields))
        if value is not None:
            try:
                _set(message, name, value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what} {name!r}: {error}") from None
    return message


def _set(message: Message, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    kind = field.message_type and message_factory.GetMessageClass(cast("Descriptor", field.message_type))
    if field.is_repeated:
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
            raise TypeError(f"takes a list, such as [{value!r}], not {_kind(value)}")
        items = value.items() if isinstance(value, Mapping) else value
        getattr(message, name).extend([_submessage(kind, item) for item in items] if kind else items)
    elif kind:
        part = getattr(message, name)
        part.SetInParent()
        part.MergeFrom(_submessage(kind, value))
    elif field.enum_type and isinstance(value, str):
        setattr(message, name, _enum_number(cast("EnumDescriptor", field.enum_type), value))
    elif field.type == field.TYPE_STRING and isinstance(value, Mapping):
        setattr(message, name, json.dumps(value))  # a JSON schema
    else:
        setattr(message, name, value)


def _submessage(kind: type[Message], value: Any) -> Message:
    """A message from another one, a mapping, seconds for a duration, or its fields' values in their order."""
    part = kind()
    if isinstance(value, kind):
        return value
    if isinstance(part, Duration):
        part.FromTimedelta(value if isinstance(value, timedelta) else timedelta(seconds=value))
        return part
    if isinstance(part, Struct) and isinstance(value, Mapping):
        part.update(value)
        return part
    if isinstance(value, Mapping):
        return filled(part, value, "field")
    return _by_position(part, value)


def _by_position(part: Message, value: Any) -> Message:
    names = [field.name for field in cast("Descriptor", part.DESCRIPTOR).fields]
    if not names:
        if value is not True:
            raise TypeError("has no value: True sets it, None leaves it unset")
        return part
    if len(names) == 1 and part.DESCRIPTOR.fields_by_name[names[0]].is_repeated:
        _set(part, names[0], value)
        return part
    values = value if isinstance(value, tuple | list) else (value,)
    if len(values) > len(names):
        raise TypeError(f"takes {' and '.join(names)}, not {len(values)} values")
    return filled(part, dict(zip(names, values, strict=False)), "field")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _close_to(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _enum_number(kind: EnumDescriptor, name: str) -> int:
    """The number of a value, by its name with or without the enum's prefix, in any case."""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    known = {full_name.removeprefix(prefix).lower(): value.number for full_name, value in kind.values_by_name.items()}
    short_name = name.removeprefix(prefix).lower().replace("-", "_")
    if short_name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return known[short_name]
