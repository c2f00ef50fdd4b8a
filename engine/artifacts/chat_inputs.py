"""What a caller gives to a chat template, checked: messages, tools and variables, each named when it is refused.

Nothing is accepted and then ignored: an input that the template never reads is refused. Not here: rendering
(`chat_template`).
"""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING, Any, Final

from engine.artifacts.fields import shown_text
from engine.artifacts.template_controls import texts_in
from engine.artifacts.tokenizer import require_unicode
from engine.contracts.errors import InvalidRequestError, UnsupportedOptionError
from engine.contracts.prompt import ChatMessage, ImagePart

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.contracts.prompt import ChatPrompt

# fmt: off
RESERVED_VARIABLES: Final = (
    "add_generation_prompt", "bos_token", "dict", "enable_thinking", "eos_token", "loop", "messages", "namespace",
    "raise_exception", "range", "self", "strftime_now", "super", "tools",
)
# fmt: on
# Words of the template language, and names that its runtime gives a meaning.
_NOT_VARIABLES: Final = frozenset(
    {"true", "false", "none", "caller", "cycler", "environment", "joiner", "kwargs", "lipsum", "varargs"}
)
_LONGEST_NAME_CHARACTERS: Final = 64


def checked_messages(chat: ChatPrompt, *, takes_images: bool = False) -> list[dict[str, Any]]:
    """The messages as templates expect them; the text parts of one are joined without anything between them.

    One that holds an image is a list of its parts instead, of which a template sees the kinds, and the texts.

    Raises:
        InvalidRequestError: there is none, or one is not usable.
        UnsupportedOptionError: a message holds an image, and the model `takes_images` not.
    """
    if not chat.messages:
        raise InvalidRequestError.of("prompt.chat.messages", "must not be empty")
    return [
        _checked_message(message, f"prompt.chat.messages[{at}]", takes_images=takes_images)
        for at, message in enumerate(chat.messages)
    ]


def checked_variables(chat: ChatPrompt) -> dict[str, Any]:
    """What the template gets besides messages and tools, whose texts are checked here too.

    Raises:
        InvalidRequestError: a name cannot be that of a variable, or a text is not valid Unicode.
    """
    for name, value in chat.template_variables.items():
        field = _variable_field(name)
        for text in texts_in(value):
            require_unicode(text, field)
    for at, tool in enumerate(chat.tools):
        for text in texts_in(tool):
            require_unicode(text, f"prompt.chat.tools[{at}]")
    thinking = {} if chat.enable_thinking is None else {"enable_thinking": chat.enable_thinking}
    return {**chat.template_variables, **thinking}


def refuse_unread(chat: ChatPrompt, read_names: Container[str]) -> None:
    """Refuse what the template, which reads `read_names`, would ignore.

    Raises:
        UnsupportedOptionError: names the first such input.
    """
    given = {f"template_variables.{name}": name for name in chat.template_variables}
    given |= {"tools": "tools"} if chat.tools else {}
    given |= {} if chat.enable_thinking is None else {"enable_thinking": "enable_thinking"}
    for path, name in given.items():
        if name not in read_names:
            raise UnsupportedOptionError(f"prompt.chat.{path}", "the model's chat template never reads it")


def _checked_message(message: ChatMessage, field: str, *, takes_images: bool) -> dict[str, Any]:
    require_unicode(message.role, f"{field}.role")
    if not message.role.strip():
        raise InvalidRequestError.of(f"{field}.role", "must not be empty")
    parts = []
    for at, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            if not takes_images:
                raise UnsupportedOptionError(f"{field}.content[{at}].image", "the served model takes text alone")
            parts.append({"type": "image"})
        else:
            require_unicode(part.text, f"{field}.content[{at}].text")
            parts.append({"type": "text", "text": part.text})
    has_image = any("text" not in part for part in parts)
    return {"role": message.role, "content": parts if has_image else "".join(part["text"] for part in parts)}


def _variable_field(name: str) -> str:
    """The path of a variable whose name a template can read and a caller may set."""
    if not name.isidentifier() or len(name) > _LONGEST_NAME_CHARACTERS:
        raise InvalidRequestError.of("prompt.chat.template_variables", f"{shown_text(name)} is no name of a variable")
    field = f"prompt.chat.template_variables.{name}"
    if name in RESERVED_VARIABLES:
        raise InvalidRequestError.of(field, "is set by the service and cannot be replaced")
    if name.startswith("__") or keyword.iskeyword(name) or name in _NOT_VARIABLES:
        raise InvalidRequestError.of(field, "is no name of a variable")
    return field
