"""Folders that nobody else can write into: code that is loaded into the process may lie there."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private_directory(path: Path) -> Path:
    """Create `path` with mode 0700, or tighten an own folder to it.

    Raises:
        OSError: it cannot be made.
        PermissionError: it belongs to another user, or is not a real folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path.name} must be a folder of the user who runs the engine")
    if not is_private(path):
        path.chmod(0o700)
    return path


def is_private(path: Path) -> bool:
    """Whether `path` is a folder of this user that nobody else may enter or change."""
    status = path.stat()
    own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return own_folder and not stat.S_IMODE(status.st_mode) & 0o077
