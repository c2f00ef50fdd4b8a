"""Keeps the text of a conversation apart from a template's control tokens while the two are being joined.

Wherever a user's text spells a control token, or could become part of one at its edge, one character is replaced by
a stand-in that occurs nowhere else; after rendering, every control token found was written by the template, and the
stand-ins are taken back. Texts that spell none are left alone, so what templates look for in them is still there.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_CANDIDATES: Final = tuple(map(chr, itertools.chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xF0100))))


class ControlPatterns:
    """Where a text spells control tokens, or could join a neighbour to one."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = {
            token[:end] for token in longest_first if not token[0].isalnum() for end in range(1, len(token))
        }
        self._endings = {
            token[start:] for token in longest_first if not token[-1].isalnum() for start in range(1, len(token))
        }
        self._edge = len(longest_first[0]) if longest_first else 1

    def exposed(self, text: str) -> set[int]:
        """Positions of the characters to replace."""
        if self._whole is None:
            return set()
        found = set()
        at = self._whole.search(text)
        while at is not None:
            found.add(at.start())
            at = self._whole.search(text, at.start() + 1)
        for end in {len(text), len(text.rstrip())}:
            starts = range(max(0, end - self._edge + 1), end)
            found.update(start for start in starts if text[start:end] in self._beginnings)
        for start in {0, len(text) - len(text.lstrip())}:
            ends = range(start + 1, min(len(text), start + self._edge - 1) + 1)
            found.update(end - 1 for end in ends if text[start:end] in self._endings)
        return found


class UserText:
    """The stand-ins of one conversation."""

    def __init__(self, patterns: ControlPatterns, texts: Iterable[str]) -> None:
        """Find what must be replaced in `texts`, which are all that the user wrote."""
        self._shielded: dict[str, str] = {}
        texts = set(texts)
        exposed = {text: positions for text in texts if (positions := patterns.exposed(text))}
        characters = sorted({text[at] for text, positions in exposed.items() for at in positions})
        free = (mark for mark in _CANDIDATES if not any(mark in text for text in texts)) if characters else iter(())
        stand_ins = dict(zip(characters, free, strict=False))
        if len(stand_ins) < len(characters):
            raise InvalidRequestError.of("prompt.chat", "holds too many kinds of Unicode noncharacters")
        self._restoring = str.maketrans({mark: character for character, mark in stand_ins.items()})
        for text, positions in exposed.items():
            characters_of = list(text)
            for at in positions:
                characters_of[at] = stand_ins[text[at]]
            self._shielded[text] = "".join(characters_of)

    @property
    def is_shielded(self) -> bool:
        """Whether anything had to be replaced."""
        return bool(self._shielded)

    def shield(self, text: str) -> str:
        """One of the texts, with stand-ins."""
        return self._shielded.get(text, text)

    def restore(self, text: str) -> str:
        """A text with the stand-ins taken back."""
        return text.translate(self._restoring) if self._shielded else text


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


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON-like value with every text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
