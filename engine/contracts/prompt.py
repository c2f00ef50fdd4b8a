"""What a caller asks the model to continue: text, token ids, or a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text. Control tokens written in it are parsed as such: the caller owns the whole prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text of a message; control tokens written in it stay text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded image of a message."""

    data: bytes


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: a role ("system", "user", "assistant", "tool") and its parts."""

    role: str
    content: tuple[TextPart | ImagePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into a prompt.

    `tools` are JSON-schema objects; `template_variables` reach the template by name.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    enable_thinking: bool | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt
