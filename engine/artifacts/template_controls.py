"""Which control tokens of a rendered conversation the template itself wrote; only those are control tokens.

Policy: text of a conversation never becomes a control token, whatever it spells and whatever the template makes of it
(cut, joined, replaced, in other case) or the tokenizer does (normalised). No text is judged. Instead the control tokens
in the template's own literals, and in the BOS and EOS texts, are replaced by marks before it is compiled; marks are
characters that no conversation holds, and after rendering they alone are read as control tokens. So a template that
searches for a control token finds those that it wrote itself, never one that a user typed.
A template may also write a token around a name, as in `'<|' ~ role ~ '|>'`. The edges are then literals and marked one
character at a time, and between them only a role of the conversation or a literal of the template is read as the name.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from engine.contracts.errors import ChatTemplateError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine.artifacts.tokenizer import Tokenizer

_MARKS: Final = range(0x10F000, 0x10FFFE)
_RESERVED: Final = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")


class ControlMarks:
    """The marks of one template under one tokenizer. Complete once the template is compiled, and constant then."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Know the control tokens of `tokenizer`; nothing is marked yet."""
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        self._contents = sorted(filter(None, self._ids), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._contents)) or r"(?!)")
        edged = [content for content in self._contents if not (content[0].isalnum() or content[-1].isalnum())]
        self._beginnings = {content[:end] for content in edged for end in range(1, len(content))}
        self._endings = {content[start:] for content in edged for start in range(1, len(content))}
        self._mark_of: dict[tuple[str, int | None], str] = {}
        self._token_of: dict[str, int | None] = {}
        self._text_of: dict[int, str] = {}
        self._names: set[str] = set()

    def belongs_to(self, tokenizer: Tokenizer) -> bool:
        """Whether these are marks for `tokenizer`."""
        return self._tokenizer is tokenizer

    def mark_template(self, tree: nodes.Template) -> None:
        """Mark the literals of a parsed template, in place."""
        _LiteralMarker(self).visit(tree)

    def mark(self, literal: str, *, is_joined: bool = False) -> str:
        """A literal with its control tokens as marks; if it may be joined to others, edges that begin or end one too.

        Raises:
            ChatTemplateError: the literal holds a character that is kept for marks, or there are too many to mark.
        """
        if _RESERVED.search(literal):
            raise ChatTemplateError("the chat template holds a character that is kept for control tokens")
        self._names.add(literal.strip().casefold())
        if not is_joined and literal.isalnum():  # a word such as a role is compared, even where it is a control token
            return literal
        pieces, end = [], 0
        for start, after, token in self._tokenizer.control_spans(literal):
            pieces += [literal[end:start], self._mark(literal[start:after], token)]
            end = after
        pieces.append(literal[end:])
        if is_joined:
            first, last = pieces[0], pieces[-1]
            pieces[0] = self._with_twins(first, 0, _longest(first[:at] in self._endings for at in self._lengths(first)))
            last = pieces[-1]
            size = _longest(last[-at:] in self._beginnings for at in self._lengths(last))
            pieces[-1] = self._with_twins(last, len(last) - size, size)
        return "".join(pieces)

    def require_absent(self, texts: Iterable[str]) -> None:
        """Refuse a conversation that holds a mark.

        Raises:
            InvalidRequestError: one of `texts` does.
        """
        if any(next(self._marks_in(text), None) is not None for text in texts):
            raise InvalidRequestError.of("prompt.chat", "holds a private-use character that is kept for control tokens")

    def hidden_characters(self, rendered: str) -> int:
        """How much longer `rendered` is once the marks are taken back."""
        return sum(len(self._text_of[ord(mark)]) - 1 for _, mark in self._marks_in(rendered))

    def restore(self, rendered: str) -> str:
        """A rendered text with the marks taken back."""
        return rendered.translate(self._text_of)

    def split(self, rendered: str, roles: Iterable[str]) -> list[str | int]:
        """Plain text, and the ids of the control tokens that the template wrote, in turn."""
        names = self._names | {role.strip().casefold() for role in roles}
        twins = {ord(mark): self._text_of[ord(mark)] for mark, token in self._token_of.items() if token is None}
        spelled = rendered.translate(twins)
        parts: list[str | int] = []
        end = 0
        for start, mark in self._marks_in(rendered):
            whole = self._token_of[mark]
            token, after = (whole, start + 1) if whole is not None else self._assembled(rendered, spelled, start, names)
            if token is not None and start >= end:
                parts += [self.restore(rendered[end:start]), token]
                end = after
        return [*parts, self.restore(rendered[end:])]

    def refuse_assembled(self, parts: Sequence[str | int], texts: Iterable[str]) -> None:
        """Refuse a template that builds control tokens in a way that is not followed, rather than lose them silently.

        Raises:
            ChatTemplateError: plain text spells a control token with punctuation that no text of a user holds.
        """
        found = [match[0] for part in parts if isinstance(part, str) for match in self._spelled.finditer(part)]
        held = set().union(*texts) if found else set()
        for content in dict.fromkeys(found):
            punctuation = {character for character in content if not character.isalnum()}
            if punctuation and held.isdisjoint(punctuation):
                raise ChatTemplateError(f"the chat template builds the control token {content!r} out of pieces")

    def _marks_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Where there is which mark."""
        return ((found.start(), found[0]) for found in _RESERVED.finditer(text) if found[0] in self._token_of)

    def _assembled(self, rendered: str, spelled: str, start: int, names: set[str]) -> tuple[int | None, int]:
        """The longest control token at `start` whose edges are the template's own, and where it ends."""
        if self._spelled.match(spelled, start) is None:
            return None, start
        for content in self._contents:
            end = start + len(content)
            if spelled.startswith(content, start) and rendered[end - 1] in self._token_of:
                name = rendered[start:end].strip("".join(self._token_of))
                if not name or (name.casefold() in names and self._token_of.keys().isdisjoint(name)):
                    return self._ids[content], end
        return None, start

    def _with_twins(self, text: str, start: int, size: int) -> str:
        twins = (self._mark(character, None) for character in text[start : start + size])
        return text[:start] + "".join(twins) + text[start + size :]

    def _mark(self, text: str, token: int | None) -> str:
        mark = self._mark_of.get((text, token))
        if mark is None:
            if len(self._mark_of) >= len(_MARKS):
                raise ChatTemplateError("the chat template spells control tokens in too many ways")
            mark = chr(_MARKS[len(self._mark_of)])
            self._mark_of[text, token], self._token_of[mark], self._text_of[ord(mark)] = mark, token, text
        return mark

    def _lengths(self, text: str) -> range:
        return range(1, min(len(text), len(self._contents[0]) if self._contents else 0) + 1)


class _LiteralMarker(NodeTransformer):
    """Marks every literal; those that are only compared, searched for or passed on are no edges of a token."""

    def __init__(self, marks: ControlMarks) -> None:
        self._marks = marks
        self._is_joined = True

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - names of node classes
        node.data = self._marks.mark(node.data, is_joined=True)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str):
            node.value = self._marks.mark(node.value, is_joined=self._is_joined)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        subject, node.node = node.node, None
        with self._only_compared():
            self.generic_visit(node)
        node.node = None if subject is None else self.visit(subject)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        return self._compared(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        return self._compared(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        return self._compared(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return self._compared(node)

    def _compared(self, node: nodes.Node) -> nodes.Node:
        with self._only_compared():
            return self.generic_visit(node)

    @contextmanager
    def _only_compared(self) -> Iterator[None]:
        before, self._is_joined = self._is_joined, False
        try:
            yield
        finally:
            self._is_joined = before


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a JSON-like value, keys included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def _longest(fits: Iterable[bool]) -> int:
    """The greatest length that fits, of lengths from one on; zero if none does."""
    return max((size for size, fit in enumerate(fits, 1) if fit), default=0)
