"""What a chat template may cost: text produced, the size of any one value, and time.

A template comes with a model's files, so it is somebody else's program. Every operation that can produce more than it
was given asks here first. Sizes are characters; each item of a container, and each turn of a loop, counts as sixteen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_SECONDS: Final = 2.0
MAX_RANGE: Final = 100_000
_FREE_CHARACTERS: Final = 4 * 2**20
_CHARACTERS_PER_INPUT_CHARACTER: Final = 64
_ITEM_SIZE: Final = 16
_CHARACTERS_PER_EXTRA_SECOND: Final = 2**20
_MAX_EXTRA_SECONDS: Final = 8.0
_MAX_INTEGER_BITS: Final = 4096
_MAX_INDENT: Final = 16
_WIDE_FIELD: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)|\{[^{}]*(?:\d{4}|\{)")


class TemplateBounds:
    """The account of one rendering. Every method raises `ChatTemplateError` when a bound is passed."""

    __slots__ = ("_characters_left", "_characters_limit", "_deadline", "_monotonic", "_seconds")

    def __init__(self, *, input_characters: int, monotonic: Callable[[], float]) -> None:
        """Open an account for an input of that size; `monotonic` gives seconds."""
        self._characters_limit = _FREE_CHARACTERS + _CHARACTERS_PER_INPUT_CHARACTER * input_characters
        self._characters_left = self._characters_limit
        self._seconds = MAX_SECONDS + min(input_characters / _CHARACTERS_PER_EXTRA_SECOND, _MAX_EXTRA_SECONDS)
        self._monotonic = monotonic
        self._deadline = monotonic() + self._seconds

    def enter(self, static_characters: int) -> None:
        """Account for one run through a body of the template, and for the template's own text in it."""
        self.spend(static_characters + _ITEM_SIZE)

    def spend(self, characters: int) -> None:
        """Account for text that is produced or copied."""
        if characters > self._characters_left:
            raise past_bounds(f"more than {self._characters_limit} characters")
        self._characters_left -= max(0, characters)
        if self._monotonic() > self._deadline:
            raise past_bounds(f"more than {self._seconds:.1f} seconds")

    def size(self, value: object) -> int:
        """Size of a value with everything in it; a value above the limit may not be worked with."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        total, waiting = 0, [value]
        while waiting:
            item: Any = waiting.pop()
            total += _ITEM_SIZE
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, list | tuple):
                waiting.extend(item)
            if total > self._characters_limit:
                raise past_bounds(f"a value of more than {self._characters_limit} characters")
        self.spend(0)
        return total

    def add(self, left: Any, right: Any) -> Any:
        """`left + right`."""
        if isinstance(left, str) and isinstance(right, str):
            self.spend(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self.size(left)
            self.size(right)
            self.spend(len(left) + len(right))
        return left + right

    def multiply(self, left: Any, right: Any) -> Any:
        """`left * right`."""
        if isinstance(left, int) and isinstance(right, int):
            self._integer_bits(left.bit_length() + right.bit_length())
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                self.spend(self.size(value) * times)
        return left * right

    def power(self, left: Any, right: Any) -> Any:
        """`left ** right`."""
        if isinstance(left, int) and isinstance(right, int):
            self._integer_bits(left.bit_length() * right)
        return left**right

    def modulo(self, left: Any, right: Any) -> Any:
        """`left % right`, a remainder or a formatted text."""
        if isinstance(left, str):
            self.formatting(left, (right,))
        return left % right

    def formatting(self, pattern: str, values: Sequence[object]) -> None:
        """Account for `values` being put into `pattern`, by `%` or by braces."""
        if _WIDE_FIELD.search(pattern):
            raise past_bounds("a field of 1000 characters or more")
        fields = pattern.count("%") + pattern.count("{")
        self.spend(len(pattern) + fields * (1000 + sum(map(self.size, values))))

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        """`text` with `old` replaced by `new`, at most `count` times if that is not negative."""
        found = text.count(old)
        self.spend(len(text) + len(new) * (found if count < 0 else min(found, count)))
        return text.replace(old, new, count)

    def join(self, separator: str, values: Iterable[object]) -> str:
        """All `values` as text, with `separator` between them."""
        texts = []
        for value in values:
            self.spend(self.size(value) + len(separator))
            texts.append(str(value))
        return separator.join(texts)

    def _integer_bits(self, bits: int) -> None:
        if bits > _MAX_INTEGER_BITS:
            raise past_bounds(f"a number of more than {_MAX_INTEGER_BITS} bits")


def check_indent(indent: object) -> None:
    """Refuse an indent that is wider than any reader needs."""
    width = len(indent) if isinstance(indent, str) else indent
    if isinstance(width, int) and width > _MAX_INDENT:
        raise past_bounds(f"an indent of more than {_MAX_INDENT} characters")


def bounded_range(*bounds: int) -> range:
    """`range`, refused beyond `MAX_RANGE` items."""
    found = range(*bounds)
    if found[MAX_RANGE:]:
        raise past_bounds(f"a range of more than {MAX_RANGE} items")
    return found


def past_bounds(what: str) -> ChatTemplateError:
    """The error for a template that asks for too much."""
    return ChatTemplateError(f"the chat template ran past its bounds: {what}")
