"""A model's chat template: where it comes from, and what a conversation becomes.

Text of the conversation is never read as control tokens: only those that the template itself wrote are encoded as such,
and how they are told apart is stated in `template_controls`. Not here: what templates may do (`template_sandbox`).
"""

from __future__ import annotations

import functools
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateAssertionError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from engine.artifacts.chat_inputs import checked_messages, checked_variables, refuse_unread
from engine.artifacts.fields import CONFIG_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES, read_object
from engine.artifacts.generation_files import TOKENIZER_CONFIG_FILE
from engine.artifacts.model_files import is_named, naming_folder, read_file
from engine.artifacts.template_bounds import TemplateBounds, past_bounds
from engine.artifacts.template_controls import ControlMarks, texts_in
from engine.artifacts.template_sandbox import CompiledTemplate, TemplateSandbox
from engine.contracts.errors import (
    ChatTemplateError,
    CorruptArtifactError,
    EngineError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import ChatPrompt

TEMPLATE_FILE: Final = "chat_template.jinja"
_MAX_SOURCE_CHARACTERS: Final = 2**20
_NOT_THERE: Final = re.compile(r"No (filter|test) named ('[\w.]{1,40}')")
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
        template = self._choose(with_tools=tools is not None).template
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

    def read_names(self, *, with_tools: bool) -> frozenset[str]:
        """The variables that the template reads; one is enough to be read somewhere, whatever comes before it.

        Raises:
            ChatTemplateError: it does not compile.
        """
        return self._choose(with_tools=with_tools).read_names

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

    def _choose(self, *, with_tools: bool) -> CompiledTemplate:
        names = (_WITH_TOOLS, _DEFAULT) if with_tools else (_DEFAULT, _WITH_TOOLS)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is None:
            raise ChatTemplateError(f"the model has no chat template named {_DEFAULT!r}")
        if isinstance(found, ChatTemplateError):
            raise ChatTemplateError(found.violations[0].description)
        return found

    def _compile(self, source: str) -> CompiledTemplate | ChatTemplateError:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            return ChatTemplateError(f"the chat template is longer than {_MAX_SOURCE_CHARACTERS} characters")
        try:
            prepare = None if self._marks is None else self._marks.mark_template
            return self._sandbox.compile_bounded(source, prepare)
        except TemplateSyntaxError as error:
            return ChatTemplateError(f"the chat template cannot be compiled: line {error.lineno} {_fault(error)}")
        except ChatTemplateError as error:
            return error
        except Exception:  # a hostile source can make the compiler fail in any way
            return ChatTemplateError("the chat template cannot be compiled")


def open_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the model in `folder`: its own file, else that of its tokenizer configuration; None without one.

    The file wins, as in Hugging Face's transformers, even over several named templates.

    Raises:
        CorruptArtifactError: a file is not what it should be.
    """
    sources: dict[str, str] = {}
    with naming_folder(folder):
        if is_named(folder / TEMPLATE_FILE):
            sources = {_DEFAULT: _read_text(folder / TEMPLATE_FILE)}
        elif is_named(folder / TOKENIZER_CONFIG_FILE):
            document = read_object(folder / TOKENIZER_CONFIG_FILE, limit_bytes=TOKENIZER_LIMIT_BYTES)
            sources = _named_sources(document.get("chat_template"))
    return _with_tokens(sources, tokenizer)


def chat_template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF file's metadata holds, with those it holds under further names; None without one."""
    named = {key.removeprefix(f"{_GGUF_KEY}."): value for key, value in metadata.items() if key.startswith(_GGUF_KEY)}
    if _GGUF_KEY in named:
        named[_DEFAULT] = named.pop(_GGUF_KEY)
    return _with_tokens({name: value for name, value in named.items() if isinstance(value, str)}, tokenizer)


def encode_chat(
    template: ChatTemplate | None, tokenizer: Tokenizer, chat: ChatPrompt, *, takes_images: bool = False
) -> tuple[str, list[int]]:
    """The text that a conversation becomes, and its token ids.

    The template alone decides about control tokens, BOS included (a doubled one is dropped), and writes one for each
    image where the model `takes_images`.

    Raises:
        InvalidRequestError: a field of the conversation is not usable; `ChatTemplateError` if the template says so.
        UnsupportedOptionError: a message holds an image that is not taken, or the template never reads something that
            is given to it.
    """
    if template is None:
        raise ChatTemplateError("the model has no chat template; send prompt.text or prompt.tokens instead")
    messages = checked_messages(chat, takes_images=takes_images)
    variables = checked_variables(chat)
    refuse_unread(chat, template.read_names(with_tools=bool(chat.tools)))
    tools = list(chat.tools) or None
    marks, marked = template.marked_for(tokenizer)
    texts = list(texts_in([messages, tools, variables]))
    marks.require_absent(texts)
    rendered = marked.render(messages, tools=tools, add_generation_prompt=chat.add_generation_prompt, **variables)
    parts = marks.split(rendered, roles=[message.role for message in chat.messages])
    marks.refuse_assembled(parts, texts)
    ids = tokenizer.encode_parts(parts, field="prompt.chat")
    return marks.restore(rendered), tokenizer.without_doubled_bos(ids)


def _fault(error: TemplateSyntaxError) -> str:
    """What is wrong with a line; a filter or test that is not there is named, since names are plain words."""
    if not isinstance(error, TemplateAssertionError):
        return "is not valid"
    named = _NOT_THERE.match(error.message or "")
    return f"uses the {named[1]} {named[2]}, which is not supported" if named else "uses what is not supported"


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
        return read_file(path, CONFIG_LIMIT_BYTES).decode()
    except UnicodeDecodeError:
        raise CorruptArtifactError(path.name, "is not text in UTF-8") from None


def _with_tokens(sources: Mapping[str, str], tokenizer: Tokenizer) -> ChatTemplate | None:
    return ChatTemplate(sources, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token) if sources else None
