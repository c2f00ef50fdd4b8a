"""Which part of a generation its caller has had with each numbered message. Pure.

A number keeps its position for ever, so that whoever has had a message can name it, whenever and from wherever. Once
numbers may have been lost that somebody has had, no later one can be known: it would be theirs too.
Units: tokens and characters, from the start of the completion.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple


class Position(NamedTuple):
    """How much of a generation lies before a point."""

    tokens: int
    characters: int


START: Final = Position(0, 0)


class Marks:
    """Positions by the sequence number of the message that led there. Messages that lead no further take no room."""

    def __init__(self) -> None:
        """Number 0 is before the first message."""
        self._firsts = [0]
        self._positions = [START]
        self._last = 0
        self._are_closed = False

    @property
    def are_closed(self) -> bool:
        """Whether no more numbers are known, whatever is sent."""
        return self._are_closed

    def close(self) -> None:
        """Numbers beyond the newest may have been lost: none of them is known from now on."""
        self._are_closed = True

    @property
    def last(self) -> int:
        """The newest number."""
        return self._last

    def add(self, position: Position) -> None:
        """Give the next message its number; without effect once they are closed."""
        if self._are_closed:
            return
        self._last += 1
        if self._positions[-1] != position:
            self._firsts.append(self._last)
            self._positions.append(position)

    def find(self, sequence: int) -> Position | None:
        """Where the caller stands who has had everything up to `sequence`; None if it was never sent."""
        if not 0 <= sequence <= self._last:
            return None
        return self._positions[bisect_right(self._firsts, sequence) - 1]
