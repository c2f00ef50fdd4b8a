"""A value that is read from files, and read again once they change. Safe from any thread.

A change that cannot be used is logged and leaves the last good value in force: a file that is being written must not
take a server down. Files are looked at when the value is asked for, at most once a second.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from service.reading import UnusableFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
Signature = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """The newest good value of some files."""

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], *, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read once. `what` names the value in the log.

        Raises:
            UnusableFileError: from `read`, now; later it is logged.
        """
        self._paths = tuple(paths)
        self._read = read
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._signature = self._look()
        self._value = read()
        self._looked_at = clock()

    def current(self) -> T:
        """The value of the files as they are now, or were at most a second ago."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= LOOK_SECONDS:
                self._looked_at = now
                self._follow(self._look())
            return self._value

    def _follow(self, signature: Signature) -> None:
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._value = self._read()
        except UnusableFileError as error:
            logger.error("%s cannot be used as it is now, the last good one stays: %s", self._what, error)
        except Exception:
            logger.exception("%s cannot be read again, the last good one stays", self._what)
        else:
            logger.info("%s was read again", self._what)

    def _look(self) -> Signature:
        """What changes with the files, whether they are written in place or replaced, by a symbolic link too."""
        return tuple(_facts(path) for path in self._paths)


def _facts(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns)
