"""A line of progress that fits, whatever the width, and that one erasure removes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from service.cli.progress import SPARE_COLUMNS, ProgressLine, progress_text

ERASE = "\r\x1b[2K"


@pytest.mark.parametrize("columns", range(121))
def test_the_last_columns_stay_free_and_the_count_is_the_last_to_go(columns: int) -> None:
    text = progress_text("reading the prompt", 0.5, "300/636 tokens", columns)
    assert len(text) <= max(columns - SPARE_COLUMNS, 0)
    assert ("300/636 tokens" in text) == (columns - SPARE_COLUMNS >= len("300/636 tokens"))
    assert ("reading the prompt" in text) == (columns >= 41)


def test_the_bar_shrinks_before_the_label_goes() -> None:
    texts = [progress_text("label", 0.5, "5/10", columns) for columns in (80, 40, 18, 17)]
    assert [text.count("━") + text.count("─") for text in texts] == [40, 26, 4, 9]
    assert ["label" in text for text in texts] == [True, True, True, False]


def test_the_bar_is_filled_by_the_share() -> None:
    shares = [progress_text("", share, "", 44).count("━") for share in (-1, 0, 0.25, 1, 2)]
    assert shares == [0, 0, 10, 40, 40]


def test_the_line_is_renewed_in_place_and_removed_at_the_end() -> None:
    shown = io.StringIO()
    with ProgressLine(Console(file=shown, force_terminal=True, width=40)) as line:
        line.show("reading", 0.0, "0/9")
        line.show("reading", 1.0, "9/9")
    _, first, second, nothing = shown.getvalue().split(ERASE)
    assert (first[-3:], second[-3:], nothing) == ("0/9", "9/9", "")
    assert "\n" not in shown.getvalue()


def test_an_interrupted_line_is_removed() -> None:
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt), ProgressLine(Console(file=shown, force_terminal=True, width=40)) as line:
        line.show("reading", 0.0, "0/9")
        raise KeyboardInterrupt
    assert shown.getvalue().endswith(ERASE)


def test_nothing_is_shown_where_nobody_looks_on() -> None:
    shown = io.StringIO()
    with ProgressLine(Console(file=shown)) as line:
        line.show("reading", 0.5, "1/2")
    assert shown.getvalue() == ""
