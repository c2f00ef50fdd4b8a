"""Values that follow their files, without looking at them more often than needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.reading import UnusableFileError
from service.reloading import LOOK_SECONDS, Reloaded


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_is_looked_at_once_a_second_and_read_when_it_has_changed(tmp_path: Path) -> None:
    path, clock, reads = tmp_path / "a", Clock(), []
    path.write_text("one")

    def read() -> str:
        reads.append(path.read_text())
        return reads[-1]

    value = Reloaded((path,), read, what="it", clock=clock)
    path.write_text("three")
    assert value.current() == "one"
    clock.now += LOOK_SECONDS
    assert value.current() == "three"
    clock.now += LOOK_SECONDS
    assert value.current() == "three"
    assert reads == ["one", "three"]


def test_a_symbolic_link_that_points_elsewhere_counts_as_a_change(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    link, clock = tmp_path / "link", Clock()
    link.symlink_to("a")
    value = Reloaded((link,), link.read_text, what="it", clock=clock)
    link.unlink()
    link.symlink_to("b")
    clock.now += LOOK_SECONDS
    assert value.current() == "b"


def test_what_cannot_be_used_at_first_is_raised(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UnusableFileError("a: no good")

    with pytest.raises(UnusableFileError, match="no good"):
        Reloaded((tmp_path / "a",), refuse, what="it")
