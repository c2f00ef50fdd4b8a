"""The next unit of prefill work, as a pure function of where a row stands. Units: tokens.

Under tail split the last prompt token always runs alone, after everything before it has settled, so that a prompt
whose prefix was reused ends with the same arithmetic as a cold one. Source: reference, autoregressive §2.2.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prefill [start, end) of the prompt; `final` when the first token can be sampled from its last position."""

    start: int
    end: int
    final: bool

    @property
    def tokens(self) -> int:
        """Width of the step."""
        return self.end - self.start


def next_prefill_step(*, length: int, position: int, chunk_size: int, tail_split: bool) -> PrefillStep:
    """Choose the step that follows `position`.

    Raises:
        ValueError: an argument is outside its range (an internal fault, never a caller's).
    """
    if chunk_size < 1 or not 0 <= position < length:
        raise ValueError(f"no prefill step for length {length}, position {position}, chunk {chunk_size}")
    remaining = length - position
    if tail_split and remaining > 1:
        return PrefillStep(position, position + min(chunk_size, remaining - 1), final=False)
    width = min(chunk_size, remaining)
    return PrefillStep(position, position + width, final=width == remaining)
