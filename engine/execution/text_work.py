"""Tokenizing and templates, and the decoding of images, on a few threads beside the loop; what may wait is bounded.

Each kind has threads of its own, so that no text waits for pixels. What a caller abandons while it waits is dropped;
what runs is small enough to be waited for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import InvalidRequestError, OverloadedError, UnavailableError
from engine.contracts.prompt import ChatPrompt, TextPart, TextPrompt
from engine.generation.planning import check_prompt_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import Prompt

T = TypeVar("T")

THREADS: Final = 2
MAX_JOBS: Final = 1024
RETRY_SECONDS: Final = 1.0

MAX_TOKENIZE_CHARACTERS: Final = 1024 * 1024
MAX_DETOKENIZE_IDS: Final = 1024 * 1024
LIKELY_CHARACTERS_PER_TOKEN: Final = 8
"""Prompts with more characters than this for each token of the context are counted before they are rendered."""
SLICE_CHARACTERS: Final = 64 * 1024


class TextWork:
    """Runs functions on texts, or on another `kind` of input, for the loop. Used on the loop alone."""

    def __init__(self, kind: str = "text") -> None:
        """Threads start with the first job."""
        self._kind = kind
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"mlx-stream-{kind}")
        self._jobs = 0

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Start work that no caller waits for, such as opening a model."""
        return self._pool.submit(function, *arguments)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run one caller's work.

        Raises:
            OverloadedError: too much waits already.
            UnavailableError: the pool was closed meanwhile.
        """
        if self._jobs >= MAX_JOBS:
            raise OverloadedError(
                f"the queue of {self._kind}s", limit=MAX_JOBS, used=self._jobs, retry_after_seconds=RETRY_SECONDS
            )
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError("stopped", "the service is shutting down") from None
        finally:
            self._jobs -= 1

    def close(self) -> None:
        """Drop what waits, and let what runs end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
