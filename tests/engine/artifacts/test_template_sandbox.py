"""What a template may do, what it may not, and that every way to run away ends in time."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest

from engine.artifacts.chat_template import ChatTemplate
from engine.contracts.errors import ChatTemplateError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi <b>"}]
INTERNALS = ("jinja", "Traceback", "object at", "__", "site-packages", "Error", "SandboxedEnvironment")


def rendered(source: str, **changes: object) -> str:
    template = ChatTemplate({"default": source}, clock=lambda: datetime(2031, 2, 3, 4, 5), **changes)  # type: ignore[arg-type]
    return template.render([dict(message) for message in MESSAGES], tools=None)


def refused(source: str, **changes: object) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        rendered(source, **changes)
    message = str(caught.value)
    assert message.startswith("prompt.chat: the chat template ")
    assert not [word for word in INTERNALS if word in message]
    return message.removeprefix("prompt.chat: the chat template ")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['content'] }}|{{ messages[0].content }}|{{ messages[-1].role }}", "hello|hello|assistant"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{%- for m in messages -%} {{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {%- endfor -%}",
         "0TrueFalse21FalseTrue2"),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{i}}{% endfor %}",
         "02"),
        ("{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(m, end='.') %}{{ m.role }}{{ end }}{% endmacro %}{{f(messages[0])}}{{f(messages[1], end='!')}}",
         "user.assistant!"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "hi <b>"),
        ("{{ messages[1]|tojson }}", '{"role": "assistant", "content": "hi <b>"}'),
        ("{{ {'a': [1, none, 'é']}|tojson(indent=2) }}", '{\n  "a": [\n    1,\n    null,\n    "é"\n  ]\n}'),
        ("{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2031"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}", "hello"),
        ("{{ messages|map(attribute='role')|join('+') }}|{{ messages|join('+', attribute='role') }}",
         "user+assistant|user+assistant"),
        ("{{ (messages + [{'role': 'tool'}])[1:]|length }}", "2"),
        ("{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}{{ '%s-%03d' % ('a', 7) }}{{ '{}:{:>3}'.format('k', 5) }}",
         "a1bxxxa-007k:  5"),
        ("{{ ' <x> '|trim|upper|replace('X', 'y')|lower }}{{ 'a-b'|replace('-', '') }}", "<y>ab"),
        ("{{ 'a,b'.split(',')|last }}{{ ' a '.strip() }}{{ 'ab'.startswith('a') }}{{ 'aba'.replace('a', 'c', 1) }}",
         "baTruecba"),
        ("{% for m in messages %}{% set x = m.role %}{{ x.replace('u', 'c') }}{{ '-'.join([x, 'y']) }}{% endfor %}",
         "cseruser-yassistantassistant-y"),
        ("{{ ['b', 'a']|sort|first }}{{ [3, 1]|max }}{{ {'k': 1}|items|list }}{{ {'k': 1}.items()|list|length }}",
         "a3[('k', 1)]1"),
        ("{{ 'a\nb\n\nc'|indent(2) }}|{{ 'a\nb'|indent('> ', first=true) }}", "a\n  b\n\n  c|> a\n> b"),
        ("{{ '<b>'|safe }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ -3|abs }}{{ '7'|int + 1 }}", "<b>333238"),
        ("{% if tools is none and nope is not defined and messages is iterable and '' is string %}ok{% endif %}", "ok"),
        ("{{ messages[0].missing }}{{ messages[0].missing|default('d') }}{{ nowhere|default('e') }}", "de"),
        ("{% if nowhere %}a{% elif messages[0].tool_calls %}b{% else %}c{% endif %}", "c"),
        ("{{ messages[0].role if messages[0].role == 'tool' }}{{ ',' if true }}{{ none or 'x' }}{{ None }}", ",xNone"),
        ("{% set text %}{{ messages[0].role }}!{% endset %}{{ text }}{% filter upper %}x{% endfilter %}", "user!X"),
        ("{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}in{% endcall %}", "[in]"),
        ("{% for m in [{'k': [{'k': []}]}] recursive %}({{ loop(m.k) }}){% endfor %}", "(())"),
        ("{{ dict(a=1, b=2)|length }}{{ [1, 2] == [1, 2] }}{{ 'e' in 'hello' }}{{ 'role' in messages[0] }}",
         "2TrueTrueTrue"),
    ],
)  # fmt: skip
def test_templates_speak_the_usual_dialect(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ self.__init__ }}",
        "{{ (nope|default(namespace)).__init__ }}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ 'x'.center(5) }}",
        "{{ 'x'.encode() }}",
        "{{ (1).to_bytes(4, 'big') }}",
        "{{ '{0.__class__}'.format('x') }}",
    ],
)
def test_what_a_template_may_not_reach_is_refused_without_details(source: str) -> None:
    assert refused(source) == "uses something that templates may not use"


@pytest.mark.parametrize(
    "source", ["{{ nope }}", "{{ nope.field }}", "{{ 'a' ~ nope }}", "{{ nope() }}", "{{ messages[0].nope.field }}"]
)
def test_an_undefined_variable_is_named(source: str) -> None:
    assert refused(source) == "needs 'nope', which is not defined"


def test_an_undefined_name_that_is_text_of_the_conversation_is_not_repeated() -> None:
    assert refused("{{ messages[0][messages[1].content].x }}") == "needs a value, which is not defined"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for %}{% endfor %}", "a\n{% nonsense %}", "{% endif %}"])
def test_a_syntax_error_names_its_line_alone(source: str) -> None:
    line = source.count("\n") + 1
    assert refused(source) == f"cannot be compiled: line {line} is not valid"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ 'x'|center(3) }}", "filter 'center'"),
        ("{{ 'x'|urlize }}", "filter 'urlize'"),
        ("{{ 'x' is nonsense }}", "test 'nonsense'"),
        ("{{ messages|attr('x') }}", "filter 'attr'"),
    ],
)
def test_an_unknown_filter_or_test_is_refused_by_name(source: str, what: str) -> None:
    assert refused(source) == f"cannot be compiled: line 1 uses the {what}, which is not supported"


@pytest.mark.parametrize(
    "source",
    [
        "{% for t in tools %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ 1 + 'a' }}",
        "{{ range('a') }}",
        "{{ {}|tojson(1, 2, 3, 4, 5, 6) }}",
        "{{ messages|tojson(indent=messages) }}",
    ],
)
def test_any_other_failure_is_told_without_details(source: str) -> None:
    assert refused(source) == "failed on this conversation"


GROWING = "{%% set ns = namespace(v=%s) %%}{%% for i in range(99) %%}%s{%% endfor %%}{{ ns.v }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) if j < 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(99) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ range(10 ** 9) }}",
        "{% set x = range(100000)|list %}" * 999,
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** 9 * [0] }}",
        "{{ (10 ** 9) ** 999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ [1]|tojson(indent=10 ** 9) }}",
        "{{ 'a\nb'|indent(10 ** 9) }}",
        "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s|replace('', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.join(s) }}",
        "{% set s = 'a' * 100000 %}{{ s|join(s) }}",
        "{% set s = 'a' * 1000000 %}{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(s) }}",
        GROWING % ("'ab'", "{% set ns.v = ns.v + ns.v %}"),
        GROWING % ("'ab'", "{% set ns.v = ns.v ~ ns.v %}"),
        GROWING % ("'ab'", "{% set ns.v %}{{ ns.v }}{{ ns.v }}{% endset %}"),
        GROWING % ("['ab']", "{% set ns.v = ns.v + ns.v %}"),
        GROWING % ("['ab']", "{% set ns.v = [ns.v, ns.v] %}"),
        GROWING % ("['ab']", "{% set ns.v = (ns.v, ns.v) %}"),
        GROWING % ("{}", "{% set ns.v = {'a': ns.v, 'b': ns.v} %}"),
        GROWING % ("{}", "{% set ns.v = dict(a=ns.v, b=ns.v) %}"),
        GROWING % ("2", "{% set ns.v = ns.v * ns.v %}"),
    ],
)  # fmt: skip
def test_every_way_to_run_away_ends(source: str) -> None:
    assert refused(source).startswith("ran past its bounds: ")


def test_a_namespace_does_not_write_out_what_it_holds() -> None:
    assert rendered(GROWING % ("1", "{% set ns.v = namespace(a=ns.v, b=ns.v) %}")) == "namespace"


def test_the_clock_ends_what_no_count_ends() -> None:
    source = "{% for i in range(100) %}{{ i }}{% endfor %}"
    assert rendered(source, monotonic=lambda: 0.0) == "".join(map(str, range(100)))
    assert refused(source, monotonic=itertools.count().__next__) == "ran past its bounds: more than 2.0 seconds"


def test_longer_conversations_may_take_longer() -> None:
    template = ChatTemplate({"default": "{{ messages|length }}{{ 'x' }}"}, monotonic=itertools.count().__next__)
    assert template.render([{"role": "user", "content": "x" * 2**23}]) == "1x"


def test_what_counts_the_steps_cannot_be_turned_back() -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    assert refused("{{ [-10 ** 12]|map('%enter')|list|length }}" + endless).startswith("ran past its bounds: ")


@pytest.mark.parametrize(
    "source",
    [
        "{{" + "[" * 3000 + "]" * 3000 + "}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ 1" + "+1" * 20000 + "}}",
        "x" * (2**20 + 1),
    ],
)
def test_a_source_that_breaks_the_compiler_is_refused(source: str) -> None:
    assert refused(source).startswith(("cannot be compiled", "is longer than"))


def test_a_template_prints_at_most_a_bounded_message() -> None:
    assert len(refused("{{ raise_exception('x' * 100000) }}")) < 1100
