"""Small files of the operator: configuration, certificates, tokens. What is no regular file is never opened."""

from __future__ import annotations

import logging
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


class UnusableFileError(Exception):
    """A file of the operator cannot be used; the message names it without its folder, and holds nothing of it."""


class UnreadableFileError(UnusableFileError):
    """The file cannot be read; the message names it without its folder, and `why` is the rest."""

    def __init__(self, path: Path, why: str) -> None:
        self.why = why
        super().__init__(f"{path.name}: {why}")


def read_small_file(path: Path, limit_bytes: int) -> bytes:
    """The bytes of a small file. Devices and pipes are not opened: they may never end, or never begin.

    Raises:
        UnreadableFileError: it is not there, no regular file, too large, or not ours to read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableFileError(path, "not a regular file")
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise UnreadableFileError(path, error.strerror or "cannot be read") from None
    if len(content) > limit_bytes:
        raise UnreadableFileError(path, f"larger than {limit_bytes} bytes")
    return content


def warn_if_exposed(path: Path) -> None:
    """Say so if every user of this machine can read a secret."""
    if path.stat().st_mode & stat.S_IROTH:
        logger.warning("%s can be read by every user of this machine", path.name)
