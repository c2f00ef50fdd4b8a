"""Folders for executable code: of this user alone, and never through somebody else's link."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from engine.runtime.kernel_directory import keep_kernels_private
from engine.runtime.private_directory import is_private, make_private_directory


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_private_directory(tmp_path / "deep" / "code")
    finally:
        os.umask(before)
    assert mode(made) == 0o700
    assert is_private(made)


def test_an_own_open_folder_is_refused_and_keeps_its_mode(tmp_path: Path) -> None:
    """Whoever could write into it may have done so already."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code").chmod(0o777)
    with pytest.raises(PermissionError, match="closed to others"):
        make_private_directory(tmp_path / "code")
    assert mode(tmp_path / "code") == 0o777


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="code must be a folder of the user"):
        make_private_directory(tmp_path / "code")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        make_private_directory(tmp_path / "code")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The process's temporary folder, for one test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_kernels_move_out_of_a_shared_temporary_folder(temporary: Path, tmp_path: Path) -> None:
    temporary.chmod(0o777)
    keep_kernels_private(tmp_path / "kernels")
    assert os.environ["TMPDIR"] == str(tmp_path / "kernels")
    assert mode(tmp_path / "kernels") == 0o700
    assert tempfile.gettempdir() == str(temporary), "Python's own temporary files stay where they were"


def test_a_private_temporary_folder_is_good_enough(temporary: Path, tmp_path: Path) -> None:
    temporary.chmod(0o700)
    keep_kernels_private(tmp_path / "kernels")
    assert os.environ["TMPDIR"] == str(temporary)
    assert not (tmp_path / "kernels").exists()


def test_a_folder_that_cannot_be_made_is_warned_about(
    temporary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    temporary.chmod(0o777)
    (tmp_path / "file").write_text("")
    keep_kernels_private(tmp_path / "file" / "kernels")
    assert os.environ["TMPDIR"] == str(temporary)
    assert "compiled kernels stay in the shared temporary folder" in caplog.text
