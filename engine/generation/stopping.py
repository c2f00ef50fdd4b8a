"""Stop sequences over text: what may be sent now, and where the text ends.

The stop that is complete first wins; of several complete at the same character, the longest. Nothing that may still
begin a stop is released, everything else is, so the outcome depends on the text alone and not on how it was cut.
Lengths are characters (code points). Not here: end-of-sequence tokens, which are ids and never text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopRule:
    """Watches one row's text for its stop sequences. Each character costs amortised constant time per stop."""

    __slots__ = ("_held", "_progress", "matched_stop")

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for `stops`; none of them may be empty."""
        for index, stop in enumerate(stops):
            if not stop:
                raise InvalidRequestError.of(f"options.stop_sequences[{index}]", "must not be empty")
        self._progress = [_StopProgress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, delta: str) -> str:
        """Add text; returns what is certain to come before any stop. After a match, always ""."""
        if self.matched_stop is not None:
            return ""
        if not self._progress:
            return delta
        window = self._held + delta
        matched = self._first_complete(delta)
        if matched is not None:
            stop, end = matched
            self.matched_stop, released = stop, window[: len(self._held) + end - len(stop)]
            self._held = ""
            return released
        kept = len(window) - max(progress.matched for progress in self._progress)
        self._held = window[kept:]
        return window[:kept]

    def flush(self) -> str:
        """End the text for another reason than a stop; returns what was held back."""
        released, self._held = self._held, ""
        for progress in self._progress:
            progress.matched = 0
        return released

    def _first_complete(self, delta: str) -> tuple[str, int] | None:
        """The winning stop and the position in `delta` just after it, or None."""
        best: tuple[str, int] | None = None
        limit = len(delta)
        for progress in self._progress:
            end = progress.advance(delta, limit)
            if end is not None and (best is None or end < best[1] or len(progress.stop) > len(best[0])):
                best, limit = (progress.stop, end), end
        return best


class _StopProgress:
    """How much of one stop the text ends with: Knuth, Morris and Pratt, with the border table made as it is needed."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0, 0]

    def advance(self, delta: str, limit: int) -> int | None:
        """Read `delta[:limit]`; returns the position after the stop's first completion, or None."""
        stop, matched, at = self.stop, self.matched, 0
        while at < limit:
            if not matched:
                at = delta.find(stop[0], at, limit)
                if at < 0:
                    break
            while matched and stop[matched] != delta[at]:
                matched = self._border(matched)
            matched += stop[matched] == delta[at]
            at += 1
            if matched == len(stop):
                self.matched = 0
                return at
        self.matched = matched
        return None

    def _border(self, length: int) -> int:
        """Length of the longest proper prefix of `stop[:length]` that also ends it."""
        stop, borders = self.stop, self._borders
        while len(borders) <= length:
            border, last = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + (stop[border] == last))
        return borders[length]
