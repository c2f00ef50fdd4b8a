"""The text of one row: its detokenizer and its stop rule, joined.

Fed with one committed token at a time; what it hands out never has to be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.generation.stopping import StopRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedText:
    """What one token brought: its own bytes, the text that became final, and the stop that it completed, if any.

    `token_bytes` belong to the token and are whole even where a stop cuts the text inside it.
    """

    token_bytes: bytes
    text: str
    matched_stop: str | None = None


class TextAssembler:
    """Turns one row's tokens into text that ends before the first stop sequence."""

    __slots__ = ("_detokenizer", "_rule")

    def __init__(self, tokenizer: Tokenizer, stop_sequences: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._rule = StopRule(stop_sequences)

    @property
    def matched_stop(self) -> str | None:
        """The stop sequence that ended the text, if one did."""
        return self._rule.matched_stop

    def push(self, token: int) -> PushedText:
        """Add a committed token."""
        token_bytes, characters = self._detokenizer.take(token)
        text = self._rule.push(characters)
        return PushedText(token_bytes=token_bytes, text=text, matched_stop=self._rule.matched_stop)

    def finish(self) -> str:
        """End the text: an unfinished character, which may still complete a stop, then everything held back."""
        return self._rule.push(self._detokenizer.flush()) + self._rule.flush()
