"""Folders that nobody else can write into: code that is loaded into the process may lie there."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private_directory(path: Path) -> Path:
    """Create `path` with mode 0700. One that is there keeps its mode: what others may have put into it is not trusted.

    Raises:
        OSError: it cannot be made.
        PermissionError: it belongs to another user, others may enter or change it, or it is not a real folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or not is_private(path):
        raise PermissionError(f"{path.name} must be a folder of the user who runs the engine, and closed to others")
    return path


def is_private(path: Path) -> bool:
    """Whether `path` is a folder of this user that nobody else may enter or change."""
    status = path.stat()
    own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return own_folder and not stat.S_IMODE(status.st_mode) & 0o077
