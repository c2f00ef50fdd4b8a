"""Prompts of an exact number of tokens, no two of which begin alike, so that no contestant's prefix cache helps it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from engine.artifacts.tokenizer_files import open_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

WORDS: Final = """\
river stone market window garden engine letter winter summer bridge doctor silver copper forest
island teacher planet number circle kitchen morning evening mountain valley harbor captain village
castle student history music paper pencil table basket orange yellow purple animal insect flower
branch shadow mirror bottle button needle thread carpet ladder hammer anchor rocket signal battle
treaty prince farmer hunter sailor painter writer singer
"""
ATTEMPTS = 100


class Prompts:
    """Draws prompts from a seeded source."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        """Count tokens with the tokenizer in `model_folder`."""
        self._tokenizer = open_tokenizer(model_folder)
        self._words = WORDS.split()
        self._random = random.Random(seed)
        self._serial = self._random.randrange(10**6)

    def draw(self, count: int, tokens: int) -> list[str]:
        """`count` prompts of `tokens` tokens each."""
        return [self._one(tokens) for _ in range(count)]

    def ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt, as every contestant has them."""
        return self._tokenizer.encode(prompt, add_special_tokens=False, parse_special_tokens=False)

    def _one(self, tokens: int) -> str:
        for _ in range(ATTEMPTS):
            self._serial += 1
            words = self._random.choices(self._words, k=tokens)
            ids = self.ids(f"{self._serial:07d} " + " ".join(words))[:tokens]
            prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
            if len(self.ids(prompt)) == tokens:
                return prompt
        raise RuntimeError(f"no prompt of {tokens} tokens could be made")
