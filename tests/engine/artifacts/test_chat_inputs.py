"""What a caller gives to a template: it arrives, or it is refused by name; nothing is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest

from engine.artifacts.chat_inputs import RESERVED_VARIABLES
from engine.artifacts.chat_template import ChatTemplate, encode_chat
from engine.contracts.errors import ChatTemplateError, EngineError, InvalidRequestError, UnsupportedOptionError
from engine.contracts.prompt import ChatMessage, ChatPrompt, TextPart
from tests.engine.artifacts.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
TOOLS = ({"name": "t"},)


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage("user", (TextPart("hello"),)),), **fields)


def rendered(sources: str | dict[str, str], prompt: ChatPrompt | None = None) -> str:
    template = ChatTemplate({"default": sources} if isinstance(sources, str) else sources)
    return encode_chat(template, TOKENIZER, prompt or chat())[0]


def refusal(sources: str | dict[str, str], prompt: ChatPrompt, kind: type[EngineError]) -> str:
    with pytest.raises(kind) as caught:
        rendered(sources, prompt)
    assert type(caught.value) is kind
    return str(caught.value)


def test_thinking_is_set_only_when_it_is_chosen() -> None:
    source = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    assert rendered(source) == "unset"
    assert rendered(source, chat(enable_thinking=False)) == "False"
    assert rendered(source, chat(enable_thinking=True)) == "True"


def test_variables_reach_the_template_by_name() -> None:
    source = "{{ reasoning_effort|default('none') }} {{ preserve_thinking is defined }}"
    assert rendered(source) == "none False"
    assert rendered(source, chat(template_variables={"reasoning_effort": "high"})) == "high False"


@pytest.mark.parametrize("name", RESERVED_VARIABLES)
def test_variables_may_not_replace_what_the_service_sets(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^prompt\.chat\.template_variables\.{name}: is set by the service"):
        rendered("", chat(template_variables={name: "x"}))


def test_tools_are_absent_rather_than_empty() -> None:
    source = "{% if tools is not none and tools %}{{ tools|length }}{{ tools[0]['name'] }}{% else %}none{% endif %}"
    assert rendered(source) == "none"
    assert rendered(source, chat(tools=({"name": "t"},))) == "1t"


UNREAD = [
    ({"tools": TOOLS}, "prompt.chat.tools"),
    ({"enable_thinking": True}, "prompt.chat.enable_thinking"),
    ({"enable_thinking": False}, "prompt.chat.enable_thinking"),
    ({"template_variables": {"nonsense": 1}}, "prompt.chat.template_variables.nonsense"),
    ({"template_variables": {"nonsense": None}}, "prompt.chat.template_variables.nonsense"),
]


@pytest.mark.parametrize(("given", "field"), UNREAD)
def test_what_the_template_never_reads_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    message = f"{field} is not supported: the model's chat template never reads it"
    for source in (
        "{{ messages[0].content }}",
        "{# tools enable_thinking nonsense #}tools enable_thinking nonsense",
        "{{ messages[0].tools }}{{ messages[0]['enable_thinking'] }}{{ messages[0].nonsense }}",
        "{% set tools = 1 %}{% set enable_thinking = 1 %}{% set nonsense = 1 %}{{ tools, enable_thinking, nonsense }}",
        "{% macro f(tools, enable_thinking, nonsense) %}{{ tools, enable_thinking, nonsense }}{% endmacro %}{{ f(1) }}",
    ):
        assert refusal(source, chat(**given), UnsupportedOptionError) == message


@pytest.mark.parametrize(
    "source",
    [
        "{{ NAME }}",
        "{% if NAME is defined %}given{% endif %}",
        "{% if not NAME is defined %}{% set NAME = none %}{% endif %}{{ NAME }}",
        "{% set NAME = NAME if NAME else 1 %}{{ NAME }}",
        "{% macro f() %}{{ NAME }}{% endmacro %}{{ f() }}",
        "{% macro f(value=NAME) %}{{ value }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ NAME }}{% endcall %}",
        "{% set held = namespace(value=NAME) %}{{ held.value }}",
        "{% block inner %}{{ NAME }}{% endblock %}",
        "{% for NAME in [NAME] %}{{ NAME }}{% endfor %}",
        "{% if messages|length > 9 %}{{ NAME }}{% endif %}",
    ],
)
def test_what_the_template_reads_anywhere_is_accepted(source: str) -> None:
    rendered(source.replace("NAME", "tools"), chat(tools=TOOLS))
    rendered(source.replace("NAME", "enable_thinking"), chat(enable_thinking=False))
    rendered(source.replace("NAME", "effort"), chat(template_variables={"effort": "high"}))


def test_of_several_templates_the_one_that_is_used_must_read_the_input() -> None:
    both = {"default": "plain", "tool_use": "{{ tools|length }}{{ effort }}"}
    assert rendered(both, chat(tools=TOOLS, template_variables={"effort": "high"})) == "1high"
    text = refusal(both, chat(template_variables={"effort": "high"}), UnsupportedOptionError)
    assert text.startswith("prompt.chat.template_variables.effort is not supported")


def test_a_template_that_does_not_compile_is_blamed_before_what_it_reads() -> None:
    assert "line 1 is not valid" in refusal("{% if %}", chat(tools=TOOLS), ChatTemplateError)


@pytest.mark.parametrize(
    "name",
    ["lipsum", "cycler", "joiner", "true", "True", "None", "none", "if", "environment", "caller", "__class__", "__x"],
)
def test_names_of_the_language_are_no_variables(name: str) -> None:
    text = refusal(f"{{{{ {name} }}}}", chat(template_variables={name: 1}), InvalidRequestError)
    assert text == f"prompt.chat.template_variables.{name}: is no name of a variable"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "1", "a\nERROR forged", "x" * 65, "\ud800", "-"])
def test_what_is_no_name_is_refused_escaped_and_cut(name: str) -> None:
    text = refusal("x", chat(template_variables={name: 1}), InvalidRequestError)
    assert text.startswith("prompt.chat.template_variables: '")
    assert text.endswith(" is no name of a variable")
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 120
