"""From token ids to text, one token at a time, byte exact.

A token contributes bytes; text is those bytes read as UTF-8, where an invalid sequence becomes U+FFFD. A
tokenizer's `decoder` section is classified into one of two rules here, and every other kind is refused at load.
Not here: stop sequences (`engine.generation.stopping`), and what the ids mean (`tokenizer`).
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.contracts.errors import UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecodingRule(Protocol):
    """How a token's written form becomes bytes, and what the start of a text loses."""

    @property
    def stripped(self) -> bytes:
        """The byte that is taken off the start of a text; empty when nothing is."""

    @property
    def stripped_count(self) -> int:
        """How many of them at most."""

    def token_bytes(self, content: str, *, added: bool) -> bytes:
        """Bytes of a token written as `content`; `added` tells that it stands outside the model's vocabulary."""


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies, as character to byte.

    Printable Latin-1 characters stand for themselves; the rest are numbered from U+0100 on, in byte order.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


class ByteLevelRule:
    """Byte-level BPE: each character of a token stands for one byte. Keeps leading spaces."""

    stripped = b""
    stripped_count = 0

    def __init__(self) -> None:
        self._byte_of = byte_alphabet().__getitem__

    def token_bytes(self, content: str, *, added: bool) -> bytes:
        """Bytes of a token. Added tokens, and tokens with a foreign character, are written in plain text."""
        if added:
            return content.encode()
        try:
            return bytes(map(self._byte_of, content))
        except KeyError:
            return content.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRule:
    """Sentencepiece style: replaced marks, `<0xNN>` byte tokens, and spaces stripped once, at the start."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    stripped: bytes = b""
    stripped_count: int = 0

    def token_bytes(self, content: str, *, added: bool) -> bytes:  # noqa: ARG002 - added pieces are written alike
        """Bytes of a token."""
        for pattern, replacement in self.replacements:
            content = content.replace(pattern, replacement)
        found = _BYTE_TOKEN.fullmatch(content) if self.byte_fallback else None
        return bytes([int(found[1], 16)]) if found else content.encode()


def classify_decoder(decoder: Mapping[str, Any] | None, *, file: str) -> DecodingRule:
    """Choose the rule for the `decoder` section of a tokenizer file.

    Raises:
        UnsupportedArtifactError: The section is absent, or holds a step or an order that no rule covers.
    """
    if decoder is None:
        raise UnsupportedArtifactError(file, "the tokenizer has no decoder, so its tokens cannot be joined to text")
    steps = _flatten(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return ByteLevelRule()
    if kinds == ["Metaspace"] and steps[0].get("prepend_scheme") == "never":
        return PieceRule(replacements=((str(steps[0]["replacement"]), " "),))
    rule = _piece_rule(steps)
    if rule is None:
        raise UnsupportedArtifactError(file, f"tokenizer decoder {' > '.join(kinds) or 'Sequence'} is not supported")
    return rule


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", ()) for step in _flatten(inner)]


def _piece_rule(steps: Sequence[Mapping[str, Any]]) -> PieceRule | None:
    """The chain Replace* ByteFallback? Fuse Strip?, or None for any other."""
    rest = list(steps)
    replacements = []
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        pattern = step.get("pattern", {}).get("String")
        if not pattern:
            return None
        replacements.append((str(pattern), str(step.get("content", ""))))
    byte_fallback = bool(rest) and rest[0].get("type") == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    if not rest or rest.pop(0).get("type") != "Fuse":
        return None
    stripped, count = b"", 0
    if rest:
        step = rest.pop(0)
        stripped, count = str(step.get("content", "")).encode(), int(step.get("start", 0))
        if step.get("type") != "Strip" or step.get("stop", 0) or len(stripped) != 1 or rest:
            return None
    return PieceRule(
        replacements=tuple(replacements), byte_fallback=byte_fallback, stripped=stripped, stripped_count=count
    )


class StreamingDetokenizer:
    """Turns one row's tokens into text that never has to be taken back.

    `push` gives the characters that became whole with this token; bytes of an unfinished character wait. `flush`
    ends the text: an unfinished character becomes U+FFFD. Joined results equal `Tokenizer.decode` of all ids.
    """

    __slots__ = ("_bytes_of", "_decoder", "_stripped", "_stripped_left")

    def __init__(self, rule: DecodingRule, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stripped = rule.stripped
        self._stripped_left = rule.stripped_count

    def take(self, token: int) -> tuple[bytes, str]:
        """Add a token: the bytes that it contributes, and the text that is final with it (either may be empty)."""
        contributed = self._bytes_of(token)
        if self._stripped_left and contributed:
            contributed = self._strip(contributed)
        return contributed, self._decoder.decode(contributed)

    def push(self, token: int) -> str:
        """Add a token; returns the text that is final with it."""
        return self.take(token)[1]

    def flush(self) -> str:
        """End the text; returns what an unfinished character leaves behind."""
        return self._decoder.decode(b"", final=True)

    def _strip(self, contributed: bytes) -> bytes:
        while self._stripped_left and contributed.startswith(self._stripped):
            contributed = contributed[1:]
            self._stripped_left -= 1
        if contributed:
            self._stripped_left = 0
        return contributed
