"""How every file of a model is opened: regular files alone, and errors that say which folder a file lies in.

A pipe, a device or a socket under a model file's name could block for ever or never end, so none is opened. Symbolic
links are followed, as Hugging Face's cache needs.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from engine.contracts.errors import ArtifactError, CorruptArtifactError, MissingArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def is_named(path: Path) -> bool:
    """Whether the folder has an entry of this name, of whatever kind: what is named and cannot be read is a fault."""
    return os.path.lexists(path)


def require_regular(path: Path) -> None:
    """Refuse what is no regular file, before a library opens it by its name.

    Raises:
        MissingArtifactError, CorruptArtifactError: see `open_file`.
    """
    with open_file(path):
        pass


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """The regular file at `path`, for reading; what the system refuses inside the block is named after it too.

    Raises:
        MissingArtifactError: there is no such file.
        CorruptArtifactError: it is no regular file, or cannot be read.
    """
    try:
        _check_kind(path, path.stat().st_mode)
        with open(path, "rb", opener=_without_waiting) as file:
            _check_kind(path, os.fstat(file.fileno()).st_mode)
            yield file
    except FileNotFoundError:
        raise MissingArtifactError(path.name, "is not there") from None
    except OSError as error:
        raise CorruptArtifactError(path.name, f"cannot be read ({error.strerror})") from None


def read_file(path: Path, limit_bytes: int) -> bytes:
    """All bytes of the file at `path`.

    Raises:
        MissingArtifactError: there is no such file.
        CorruptArtifactError: it is no regular file of at most `limit_bytes`, or cannot be read.
    """
    with open_file(path) as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise CorruptArtifactError(path.name, f"is larger than the {limit_bytes} bytes that such a file may have")
    return raw


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Let errors about files in `folder` begin with its own name: "FOLDER/config.json: …"."""
    try:
        yield
    except ArtifactError as error:
        if error.file == folder.name:
            raise
        raise type(error)(f"{folder.name}/{error.file}", error.detail) from None


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CorruptArtifactError(path.name, f"is {_kind(mode)}, not a regular file")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _without_waiting(path: str, flags: int) -> int:
    """Open at once, even if a pipe has taken the file's place since it was looked at."""
    return os.open(path, flags | os.O_NONBLOCK)
