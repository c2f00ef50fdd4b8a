"""The next unit of prefill work, as a pure function of where a row stands. Units: tokens.

Under tail split the last prompt token always attends alone, after everything before it, so that a prompt whose prefix
was reused ends with the same arithmetic as a cold one. Source: reference, autoregressive §2.2. Where a step can hold
both, it does, which saves a step before the first token: decision 0014.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prefill [start, end) of the prompt; `final` when the first token can be sampled from its last position.

    `joined` when the last of three tokens or more must attend by itself.
    """

    start: int
    end: int
    final: bool
    joined: bool = False

    @property
    def tokens(self) -> int:
        """Width of the step."""
        return self.end - self.start


def next_prefill_step(
    *, length: int, position: int, chunk_size: int, tail_split: bool, joins_tail: bool = False
) -> PrefillStep:
    """Choose the step that follows `position`; `joins_tail` when a step can hold a chunk and the tail after it.

    Raises:
        ValueError: an argument is outside its range (an internal fault, never a caller's).
    """
    if chunk_size < 1 or not 0 <= position < length:
        raise ValueError(f"no prefill step for length {length}, position {position}, chunk {chunk_size}")
    remaining = length - position
    if tail_split and joins_tail and 2 < remaining <= chunk_size:
        return PrefillStep(position, length, final=True, joined=True)
    if tail_split and remaining > 1:
        return PrefillStep(position, position + min(chunk_size, remaining - 1), final=False)
    width = min(chunk_size, remaining)
    return PrefillStep(position, position + width, final=width == remaining)
