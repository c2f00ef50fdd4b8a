"""A model's chat template: where it comes from, and what a conversation becomes.

Text of the conversation is never read as control tokens: only those that the template itself wrote are encoded as such,
and how they are told apart is stated in `template_controls`. Not here: what templates may do (`template_sandbox`).
"""

from __future__ import annotations

import functools
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateAssertionError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from engine.artifacts.fields import CONFIG_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES, read_object
from engine.artifacts.generation_files import TOKENIZER_CONFIG_FILE
from engine.artifacts.template_bounds import TemplateBounds, past_bounds
from engine.artifacts.template_controls import ControlMarks, texts_in
from engine.artifacts.template_sandbox import TemplateSandbox
from engine.artifacts.tokenizer import require_unicode
from engine.contracts.errors import (
    ChatTemplateError,
    CorruptArtifactError,
    EngineError,
    InvalidRequestError,
    UnsupportedOptionError,
)
from engine.contracts.prompt import ChatMessage, ImagePart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from jinja2 import Template

    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import ChatPrompt

TEMPLATE_FILE: Final = "chat_template.jinja"
# fmt: off
RESERVED_VARIABLES: Final = (
    "add_generation_prompt", "bos_token", "dict", "enable_thinking", "eos_token", "loop", "messages", "namespace",
    "raise_exception", "range", "self", "strftime_now", "super", "tools",
)
# fmt: on
_MAX_SOURCE_CHARACTERS: Final = 2**20
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_GGUF_KEY: Final = "tokenizer.chat_template"


class ChatTemplate:
    """Compiled once, rendered from any thread. A template that does not compile says so when it is used."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], datetime] = datetime.now,
        monotonic: Callable[[], float] = time.monotonic,
        marks: ControlMarks | None = None,
    ) -> None:
        """Compile `sources`: one template, or several by name, of which "tool_use" serves conversations with tools.

        `clock` gives the local time, `monotonic` seconds for the time limit. With `marks`, what is rendered holds marks
        in place of the control tokens that the template writes.
        """
        self._again = functools.partial(
            ChatTemplate, sources, bos_token=bos_token, eos_token=eos_token, clock=clock, monotonic=monotonic
        )
        self._marked: tuple[ControlMarks, ChatTemplate] | None = None
        self._sandbox = TemplateSandbox(clock)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._monotonic = monotonic
        self._marks = marks
        if marks is not None:
            self._tokens = {name: marks.mark(text, is_joined=True) for name, text in self._tokens.items()}
        self._templates = {name: self._compile(source) for name, source in sources.items()}

    def render(self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, **variables: Any) -> str:
        """The prompt of `messages`.

        Raises:
            ChatTemplateError: the template raised, does not compile, uses what it may not, or ran past its bounds.
        """
        template = self._choose(with_tools=tools is not None)
        values = {**self._tokens, **variables, "messages": messages, "tools": tools}
        size = sum(map(len, texts_in(values)))
        bounds = TemplateBounds(input_characters=size, monotonic=self._monotonic)
        with self._sandbox.accounting(bounds):
            try:
                text = template.render(values)
            except ChatTemplateError as error:
                raise ChatTemplateError(self._unmarked(error.violations[0].description, bounds)) from None
            except EngineError:
                raise
            except Exception as error:
                raise _template_error(error) from None
        self._unmarked(text, bounds)
        return text

    def marked_for(self, tokenizer: Tokenizer) -> tuple[ControlMarks, ChatTemplate]:
        """Marks for the control tokens of `tokenizer`, and this template with them: made at the first use, and kept."""
        held = self._marked
        if held is None or not held[0].belongs_to(tokenizer):
            marks = ControlMarks(tokenizer)
            held = self._marked = (marks, self._again(marks=marks))
        return held

    def _unmarked(self, text: str, bounds: TemplateBounds) -> str:
        """`text` with the marks taken back, which is on the account too."""
        if self._marks is None:
            return text
        bounds.spend(self._marks.hidden_characters(text))
        return self._marks.restore(text)

    def _choose(self, *, with_tools: bool) -> Template:
        names = (_WITH_TOOLS, _DEFAULT) if with_tools else (_DEFAULT, _WITH_TOOLS)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is None:
            raise ChatTemplateError(f"the model has no chat template named {_DEFAULT!r}")
        if isinstance(found, ChatTemplateError):
            raise ChatTemplateError(found.violations[0].description)
        return found

    def _compile(self, source: str) -> Template | ChatTemplateError:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            return ChatTemplateError(f"the chat template is longer than {_MAX_SOURCE_CHARACTERS} characters")
        try:
            prepare = None if self._marks is None else self._marks.mark_template
            template: Template = self._sandbox.compile_bounded(source, prepare)
        except TemplateSyntaxError as error:
            unknown = isinstance(error, TemplateAssertionError)
            fault = "uses a filter or test that is not supported" if unknown else "is not valid"
            return ChatTemplateError(f"the chat template cannot be compiled: line {error.lineno} {fault}")
        except ChatTemplateError as error:
            return error
        except Exception:  # a hostile source can make the compiler fail in any way
            return ChatTemplateError("the chat template cannot be compiled")
        return template


def open_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the model in `folder`: of its tokenizer configuration, else of its own file; None without one.

    Raises:
        CorruptArtifactError: a file is not what it should be.
    """
    sources: dict[str, str] = {}
    if (folder / TOKENIZER_CONFIG_FILE).is_file():
        document = read_object(folder / TOKENIZER_CONFIG_FILE, limit_bytes=TOKENIZER_LIMIT_BYTES)
        sources = _named_sources(document.get("chat_template"))
    if not sources and (folder / TEMPLATE_FILE).is_file():
        sources = {_DEFAULT: _read_text(folder / TEMPLATE_FILE)}
    return _with_tokens(sources, tokenizer)


def chat_template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF file's metadata holds, with those it holds under further names; None without one."""
    named = {key.removeprefix(f"{_GGUF_KEY}."): value for key, value in metadata.items() if key.startswith(_GGUF_KEY)}
    if _GGUF_KEY in named:
        named[_DEFAULT] = named.pop(_GGUF_KEY)
    return _with_tokens({name: value for name, value in named.items() if isinstance(value, str)}, tokenizer)


def encode_chat(template: ChatTemplate | None, tokenizer: Tokenizer, chat: ChatPrompt) -> tuple[str, list[int]]:
    """The text that a conversation becomes, and its token ids.

    The template alone decides about control tokens, BOS included (a doubled one is dropped). The text parts of a
    message are joined without anything between them.

    Raises:
        InvalidRequestError: a field of the conversation is not usable; `ChatTemplateError` if the template says so.
        UnsupportedOptionError: a message holds an image.
    """
    if template is None:
        raise ChatTemplateError("the model has no chat template; send prompt.text or prompt.tokens instead")
    messages = _checked_messages(chat)
    variables = _checked_variables(chat)
    tools = list(chat.tools) or None
    marks, marked = template.marked_for(tokenizer)
    texts = list(texts_in([messages, tools, variables]))
    marks.require_absent(texts)
    rendered = marked.render(messages, tools=tools, add_generation_prompt=chat.add_generation_prompt, **variables)
    parts = marks.split(rendered, roles=[message.role for message in chat.messages])
    marks.refuse_assembled(parts, texts)
    ids = tokenizer.encode_parts(parts, field="prompt.chat")
    return marks.restore(rendered), tokenizer.without_doubled_bos(ids)


def _checked_messages(chat: ChatPrompt) -> list[dict[str, Any]]:
    if not chat.messages:
        raise InvalidRequestError.of("prompt.chat.messages", "must not be empty")
    return [_checked_message(message, f"prompt.chat.messages[{at}]") for at, message in enumerate(chat.messages)]


def _checked_message(message: ChatMessage, field: str) -> dict[str, Any]:
    require_unicode(message.role, f"{field}.role")
    if not message.role.strip():
        raise InvalidRequestError.of(f"{field}.role", "must not be empty")
    texts = []
    for at, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            raise UnsupportedOptionError(f"{field}.content[{at}].image", "the served model takes text alone")
        require_unicode(part.text, f"{field}.content[{at}].text")
        texts.append(part.text)
    return {"role": message.role, "content": "".join(texts)}


def _checked_variables(chat: ChatPrompt) -> dict[str, Any]:
    for name, value in chat.template_variables.items():
        field = f"prompt.chat.template_variables.{name}"
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError.of(field, "is set by the service and cannot be replaced")
        for text in texts_in(value):
            require_unicode(text, field)
    for at, tool in enumerate(chat.tools):
        for text in texts_in(tool):
            require_unicode(text, f"prompt.chat.tools[{at}]")
    thinking = {} if chat.enable_thinking is None else {"enable_thinking": chat.enable_thinking}
    return {**chat.template_variables, **thinking}


def _template_error(error: Exception) -> ChatTemplateError:
    """What may be told about a failure inside a template: nothing of its values, nothing of the library."""
    if isinstance(error, UndefinedError):
        return ChatTemplateError(f"the chat template needs {error.message}, which is not defined")
    if isinstance(error, SecurityError):
        return ChatTemplateError("the chat template uses something that templates may not use")
    if isinstance(error, RecursionError | MemoryError):
        return past_bounds("nested too deeply" if isinstance(error, RecursionError) else "more memory than there is")
    if isinstance(error, TemplateError):
        return ChatTemplateError("the chat template asks for something that does not exist")
    return ChatTemplateError("the chat template failed on this conversation")


def _named_sources(value: object) -> dict[str, str]:
    """The `chat_template` of a tokenizer configuration: one text, or a list of named ones."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = value if isinstance(value, list) else [None]
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if len(named) != len(entries):
        raise CorruptArtifactError(TOKENIZER_CONFIG_FILE, "chat_template must be text, or a list of named templates")
    return named


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(CONFIG_LIMIT_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        raise CorruptArtifactError(path.name, "cannot be read as text") from None


def _with_tokens(sources: Mapping[str, str], tokenizer: Tokenizer) -> ChatTemplate | None:
    return ChatTemplate(sources, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token) if sources else None
