"""What every way of fetching a model shares: progress from a growing folder, one pull at a time, plain disk errors.

Package and hub clients report progress each in their own way, and differently from version to version; the bytes
that arrive on the disk are the same for all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from engine.contracts.errors import MissingArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOOK_SECONDS: Final = 0.1

Stage = Literal["waiting", "downloading", "unpacking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """How far a pull is. "waiting" means that another process pulls the same model."""

    stage: Stage
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[PullProgress], None]


def no_progress(progress: PullProgress) -> None:
    """Ignore `progress`."""


@contextlib.contextmanager
def growth_reported(measure: Callable[[], int], total_bytes: int, progress: Progress) -> Iterator[None]:
    """Report a download, ten times a second, as what `measure` (bytes on the disk) gained since the start."""
    done = threading.Event()
    start_bytes = measure()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            gained = min(max(measure() - start_bytes, 0), total_bytes)
            progress(PullProgress(stage="downloading", done_bytes=gained, total_bytes=total_bytes))

    watcher = threading.Thread(target=look, name="pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def exclusive(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Hold `lock_file`; the system lets go of it when the process ends, however it ends."""
    with lock_file.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(PullProgress(stage="waiting"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_errors_named(file: str) -> Iterator[None]:
    """Turn what the file system refuses into one clear line about `file`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else f"the model cache cannot be written ({error.strerror})"
        raise MissingArtifactError(file, f"cannot be kept: {why}") from None


def bytes_under(folder: Path, pattern: str = "*") -> int:
    """Bytes of all files under `folder` whose names match; files that vanish meanwhile count nothing."""
    total_bytes = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob(pattern):
            with contextlib.suppress(OSError):
                total_bytes += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
    return total_bytes
