"""How much text the threads beside the loop are given: what is refused before or while it is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import InvalidRequestError
from engine.contracts.prompt import ChatPrompt, TextPart, TextPrompt
from engine.generation.planning import check_prompt_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import Prompt

MAX_TOKENIZE_CHARACTERS: Final = 1024 * 1024
MAX_DETOKENIZE_IDS: Final = 1024 * 1024
LIKELY_CHARACTERS_PER_TOKEN: Final = 8
"""Prompts with more characters than this for each token of the context are counted before they are rendered."""
SLICE_CHARACTERS: Final = 64 * 1024


def check_tokenize(text: str) -> None:
    """Refuse text that would take a thread for too long."""
    if len(text) > MAX_TOKENIZE_CHARACTERS:
        raise InvalidRequestError.of(
            "text", f"at most {MAX_TOKENIZE_CHARACTERS} characters are allowed, got {len(text)}"
        )


def check_detokenize(ids: Sequence[int]) -> None:
    """Refuse more ids than any text needs."""
    if len(ids) > MAX_DETOKENIZE_IDS:
        raise InvalidRequestError.of("ids", f"at most {MAX_DETOKENIZE_IDS} are allowed, got {len(ids)}")


def refuse_hopeless_prompt(
    prompt: Prompt, tokenizer: Tokenizer, context_length: int, max_prompt_tokens: int | None = None
) -> None:
    """Refuse a prompt that is far too long after counting only as much of it as it takes to know.

    Raises:
        PromptTooLongError: with the tokens that were counted.
    """
    too_many = context_length if max_prompt_tokens is None else min(context_length, max_prompt_tokens + 1)
    if _characters(prompt) <= LIKELY_CHARACTERS_PER_TOKEN * too_many:
        return
    counted = 0
    for piece in _slices(prompt):
        counted += len(tokenizer.encode(piece, add_special_tokens=False, parse_special_tokens=False))
        if counted >= too_many:
            check_prompt_length(counted, context_length=context_length, max_prompt_tokens=max_prompt_tokens)


def _characters(prompt: Prompt) -> int:
    return sum(len(text) for text in _texts(prompt))


def _slices(prompt: Prompt) -> Iterator[str]:
    for text in _texts(prompt):
        for start in range(0, len(text), SLICE_CHARACTERS):
            yield text[start : start + SLICE_CHARACTERS]


def _texts(prompt: Prompt) -> Iterator[str]:
    match prompt:
        case TextPrompt():
            yield prompt.text
        case ChatPrompt():
            for message in prompt.messages:
                for part in message.content:
                    if isinstance(part, TextPart):
                        yield part.text
