"""One line on a terminal that says how far something is, and leaves no trace.

It never fills the last columns, so that what the terminal adds there (`^C`) cannot wrap it, and one erasure removes it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from rich.console import Console

SPARE_COLUMNS: Final = 3
WIDEST_BAR: Final = 40
NARROWEST_BAR: Final = 4
_ERASE_LINE: Final = "\r\x1b[2K"


class ProgressLine:
    """Shows itself on a terminal, and nowhere else. The end of its `with` block removes it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, label: str, share: float, count: str) -> None:
        """Show, or renew, the line. `share` is what is done of the whole, from 0 to 1; `count` says it in numbers."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        filled, empty = "━─" if self._console.encoding.startswith("utf") else "#-"
        line = progress_text(label, share, count, self._console.width, filled=filled, empty=empty)
        self._shown = True
        self._console.file.write(_ERASE_LINE + line)
        self._console.file.flush()

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._shown:
            self._shown = False
            self._console.file.write(_ERASE_LINE)
            self._console.file.flush()


def progress_text(label: str, share: float, count: str, columns: int, *, filled: str = "━", empty: str = "─") -> str:
    """The line for a terminal of `columns`: the bar gives way first, then the label, and the count at the very last."""
    room = columns - SPARE_COLUMNS
    if room < len(label) + NARROWEST_BAR + len(count) + 2:
        label = ""
    bar_columns = min(WIDEST_BAR, room - len(count) - 1 - (len(label) + 1 if label else 0))
    filled_columns = round(max(bar_columns, 0) * min(max(share, 0.0), 1.0))
    bar = filled * filled_columns + empty * (bar_columns - filled_columns) if bar_columns >= NARROWEST_BAR else ""
    return " ".join(part for part in (label, bar, count) if part)[: max(room, 0)]
