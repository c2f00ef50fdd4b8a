"""The jinja2 environment of chat templates: what they may use, and every step of theirs on the account.

Dialect as Hugging Face renders it (trimmed blocks, loop controls, `{% generation %}`, `tojson`, `raise_exception`,
`strftime_now`). A template reaches no file, no attribute of Python's own, and no filter outside the list below.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Undefined, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from engine.artifacts.template_bounds import bounded_range, check_indent
from engine.artifacts.template_instruments import CHECK, CONCATENATE, ENTER, instrument
from engine.contracts.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from datetime import datetime

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from engine.artifacts.template_bounds import TemplateBounds

# fmt: off
_FILTERS: Final = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort",
    "string", "title", "trim", "unique", "upper",
)
_COMPARING_TESTS: Final = (
    "eq", "equalto", "==", "ne", "!=", "gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<", "le", "<=", "in",
)
_METHODS: Final[Mapping[type, Container[str]]] = {
    str: (
        "capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
        "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    ),
    dict: ("copy", "get", "items", "keys", "values"),
    list: ("copy", "count", "index"),
    tuple: ("count", "index"),
    float: ("is_integer",),
    int: (),
    bytes: (),
}
# fmt: on
_MAX_FORMAT_CHARACTERS: Final = 256
_MAX_MESSAGE_CHARACTERS: Final = 1000
_SCOPES: Final = ("_loop_vars", "_block_vars")  # which jinja2 passes along with every call inside a loop or a block
_NAME: Final = re.compile(r"[A-Za-z_]\w{0,63}")
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f\U0010f000-\U0010fffd]")  # nor a mark of a control token


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTemplate:
    """A template, and the names of the variables that it reads."""

    template: Template
    read_names: frozenset[str]


class LenientUndefined(Undefined):
    """A missing field is empty, as templates expect; a missing variable may be tested, but not written out."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        name = self._undefined_name
        return f"{name!r}" if isinstance(name, str) and _NAME.fullmatch(name) else "a value"

    def __str__(self) -> str:
        if self._undefined_obj is missing:
            self._fail_with_undefined_error()
        return ""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates, and renders each under the bounds that `accounting` set for this thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        """`clock` gives the local time that `strftime_now` writes out."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
            undefined=LenientUndefined,
            finalize=self._written,
            optimized=False,
            cache_size=0,
        )
        self._clock = clock
        self._thread = threading.local()
        self.globals = {
            "dict": self._dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": bounded_range,
            "strftime_now": self._strftime_now,
        }
        known: Mapping[str, Any] = self.filters
        self.filters = {name: self._bounded(known[name]) for name in _FILTERS} | {
            CHECK: self._checked,
            CONCATENATE: lambda values: self._bounds.join("", values),
            ENTER: lambda characters: self._bounds.enter(characters),
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "safe": str,
            "tojson": self._tojson,
        }
        tests: Mapping[str, Any] = self.tests
        self.tests = {**tests, **{name: self._bounded(tests[name]) for name in _COMPARING_TESTS}}

    @contextmanager
    def accounting(self, bounds: TemplateBounds) -> Iterator[None]:
        """Charge what this thread renders inside to `bounds`."""
        self._thread.bounds = bounds
        try:
            yield
        finally:
            del self._thread.bounds

    def compile_bounded(self, source: str, prepare: Callable[[nodes.Template], None] | None = None) -> CompiledTemplate:
        """A template whose every statement is on the account, after `prepare` has rewritten what was parsed.

        The names that it reads are those that it may find among its variables, through macros and blocks too.

        Raises whatever jinja2 raises on a bad source.
        """
        tree = self.parse(source)
        read_names = frozenset(meta.find_undeclared_variables(tree))
        if prepare is not None:
            prepare(tree)
        instrument(tree)
        template = self.template_class.from_code(self, self.compile(tree), self.globals)
        return CompiledTemplate(template=template, read_names=read_names)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use `obj.attr`; of plain values, only harmless methods."""
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:  # noqa: ARG002
        """Refuse at once, where the sandbox would only give an undefined value."""
        raise SecurityError("unsafe attribute")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        """Run an operator that can make much out of little."""
        bounds = self._bounds
        operations = {"+": bounds.add, "*": bounds.multiply, "**": bounds.power, "%": bounds.modulo}
        return operations[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what the template calls; text methods that can make much out of little are replaced by bounded ones."""
        bounds, owner, name = __self._bounds, getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return bounds.replace(owner, *args, **{key: kwargs[key] for key in kwargs if key not in _SCOPES})
        if isinstance(owner, str) and name == "join":
            return bounds.join(owner, *args)
        return __self._account(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own `str.format`, on the account."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            self._bounds.formatting(value.__self__, (*args, *kwargs.values()))
            return safe(*args, **kwargs)

        return formatted

    @property
    def _bounds(self) -> TemplateBounds:
        bounds: TemplateBounds = self._thread.bounds
        return bounds

    @pass_context
    def _written(self, _context: Context, value: Any) -> Any:
        """Account for every value that the template writes out."""
        return self._account(value)

    def _account(self, value: Any) -> Any:
        self._bounds.spend(self._bounds.size(value))
        return value

    def _checked(self, value: Any) -> Any:
        self._bounds.size(value)
        return value

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its arguments checked and its result on the account."""

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                self._bounds.size(value)
            return self._account(function(*args, **kwargs))

        return bounded

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return self._checked(dict(*args, **kwargs))  # type: ignore[no-any-return]

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > _MAX_FORMAT_CHARACTERS:
            raise ChatTemplateError(f"the chat template formats the time with over {_MAX_FORMAT_CHARACTERS} characters")
        return self._clock().strftime(pattern)

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = [self.getitem(value, attribute) for value in values]
        return self._bounds.join(d, values)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        self._checked(text)
        return self._bounds.replace(str(text), old, new, -1 if count is None else count)

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        check_indent(width)
        prefix = width if isinstance(width, str) else " " * width
        lines = str(text).splitlines(keepends=True)
        self._bounds.spend(len(text) + len(prefix) * len(lines))
        return "".join(
            prefix + line if (first or number) and (blank or line.strip()) else line
            for number, line in enumerate(lines)
        )

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Hugging Face writes it into prompts: nothing is escaped for HTML."""
        check_indent(indent)
        self._checked(value)
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        return self._account(_NOT_ASCII.sub(_escaped, text) if ensure_ascii else text)  # type: ignore[no-any-return]


class _Namespace(Namespace):
    """A namespace that does not write out what it holds."""

    def __repr__(self) -> str:
        return "namespace"


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the extension protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise ChatTemplateError(f"the chat template refuses the conversation: {str(message)[:_MAX_MESSAGE_CHARACTERS]}")


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
