"""From requests to the engine's contracts. Pure: reads messages, touches nothing.

Every field is carried over or refused by name; ranges are checked by the contracts; presence, form and size here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from engine.contracts.errors import InvalidRequestError
from engine.contracts.events import GenerationRequest
from engine.contracts.prompt import ChatMessage, ChatPrompt, ImagePart, Prompt, TextPart, TextPrompt, TokenPrompt
from service.decode_options import decode_options
from service.decode_values import require_few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.struct_pb2 import Struct, Value

    from mlxstream.v1 import generation_pb2, prompt_pb2

    GenerationMessage: TypeAlias = generation_pb2.GenerateRequest | generation_pb2.CompleteRequest

MAX_MODEL_NAME_CHARACTERS: Final = 256
MAX_EXACT_INTEGER: Final = 2**53
MAX_PARTS: Final = 65_536
MAX_STRUCTS_BYTES: Final = 1024 * 1024
_REQUEST_ID = re.compile(r"[\x21-\x7e]{0,128}")


def decode_generation(
    request: GenerationMessage,
    *,
    caller: str,
    priority: int = 0,
    max_prompt_tokens: int | None = None,
    deadline_seconds: float | None = None,
) -> GenerationRequest:
    """What Generate and Complete ask for, but for the delivery; the rest is said of the call, not in the message.

    Raises:
        InvalidRequestError: a field is missing, malformed or out of range.
    """
    return GenerationRequest(
        prompt=decode_prompt(request),
        options=decode_options(request.options),
        request_id=decode_request_id(request.request_id),
        model=decode_model(request.model),
        caller=caller,
        priority=priority,
        draft_blocks=request.delivery.draft_blocks,
        max_prompt_tokens=max_prompt_tokens,
        deadline_seconds=deadline_seconds,
    )


def decode_request_id(request_id: str) -> str:
    """A caller's name for a request: at most 128 visible ASCII characters; "" asks for a minted one."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError.of("request_id", "must be at most 128 visible ASCII characters")
    return request_id


def decode_model(name: str) -> str:
    """A model's name, bounded so that an answer can repeat it."""
    if len(name) > MAX_MODEL_NAME_CHARACTERS:
        raise InvalidRequestError.of("model", f"must be at most {MAX_MODEL_NAME_CHARACTERS} characters")
    return name


def decode_prompt(request: GenerationMessage) -> Prompt:
    """The arm of `prompt` that is set."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text.text)
        case "tokens":
            require_few(request.tokens, "ids", "tokens.ids")
            return TokenPrompt(tuple(request.tokens.ids))
        case "chat":
            return decode_chat(request.chat)
        case _:
            raise InvalidRequestError.of("prompt", "one of text, tokens and chat must be set")


def decode_chat(chat: prompt_pb2.ChatPrompt) -> ChatPrompt:
    """A conversation, which every request that takes one calls `chat`."""
    _require_size(chat)
    return ChatPrompt(
        messages=tuple(_message(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)),
        tools=tuple(_json(tool, field=f"chat.tools[{index}]") for index, tool in enumerate(chat.tools)),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        template_variables=_json(chat.template_variables, field="chat.template_variables"),
    )


def _require_size(chat: prompt_pb2.ChatPrompt) -> None:
    """Refuse what would become too much, before anything is made of it."""
    if not chat.messages:
        raise InvalidRequestError.of("chat.messages", "at least one message is needed")
    require_few(chat, "messages", "chat.messages")
    require_few(chat, "tools", "chat.tools")
    parts = sum(len(message.content) for message in chat.messages)
    if parts > MAX_PARTS:
        raise InvalidRequestError.of("chat.messages", f"at most {MAX_PARTS} parts are allowed in all, got {parts}")
    _require_bytes(chat.tools, "chat.tools")
    _require_bytes([chat.template_variables], "chat.template_variables")


def _require_bytes(structs: Sequence[Struct], field: str) -> None:
    size_bytes = sum(struct.ByteSize() for struct in structs)
    if size_bytes > MAX_STRUCTS_BYTES:
        raise InvalidRequestError.of(field, f"at most {MAX_STRUCTS_BYTES} bytes are allowed, got {size_bytes}")


def _message(message: prompt_pb2.ChatMessage, path: str) -> ChatMessage:
    if not message.role:
        raise InvalidRequestError.of(f"{path}.role", "must not be empty")
    require_few(message, "content", f"{path}.content")
    content = tuple([_part(part) for part in message.content])
    if None in content:
        raise InvalidRequestError.of(f"{path}.content[{content.index(None)}]", "one of text and image must be set")
    return ChatMessage(role=message.role, content=content)  # type: ignore[arg-type]


def _part(part: prompt_pb2.ContentPart) -> TextPart | ImagePart | None:
    match part.WhichOneof("part"):
        case "text":
            return TextPart(part.text)
        case "image":
            return ImagePart(part.image)
        case _:
            return None


def _json(struct: Struct, *, field: str) -> dict[str, Any]:
    """The JSON object. On the wire every number is a double; whole ones become integers again."""
    return {key: _json_value(value, field=f"{field}.{key}") for key, value in struct.fields.items()}


def _json_value(value: Value, *, field: str) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _json(value.struct_value, field=field)
        case "list_value":
            elements = enumerate(value.list_value.values)
            return [_json_value(element, field=f"{field}[{index}]") for index, element in elements]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidRequestError.of(field, f"must be a finite number, got {number}")
            return int(number) if number.is_integer() and abs(number) <= MAX_EXACT_INTEGER else number
        case "null_value" | None:
            return None
        case kind:
            return getattr(value, kind)
