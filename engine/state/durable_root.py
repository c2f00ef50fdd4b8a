"""Where durable generations lie: one folder for each, named by its id and its key, and locked by whoever runs it.

There is no index: names and locks are all that is asked, so that a kill at any instant leaves nothing to repair, and
servers can share the place. The kernel drops the locks of a process that dies. What was delivered says so by an empty
file, dated when it is to go; what has gone leaves a mark, so that a caller can be told that it was there. Nothing is
trusted unless it is this user's alone, and nothing is touched that is not named as we name. Touches no array.
Units: bytes, and seconds since the epoch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.runtime.private_directory import is_private, make_private_directory
from engine.state.checkpoint_file import HEAD

if TYPE_CHECKING:
    from pathlib import Path

OWN_FOLDER: Final = "durable"
GENERATION_ID: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{64})")
_MARK: Final = re.compile(r"([0-9a-f]{32})\.gone")
_REMOVED_SUFFIX: Final = ".removed"
_REMOVED: Final = re.compile(_NAME.pattern + re.escape(_REMOVED_SUFFIX))
_DELIVERED: Final = "delivered"
_MAKING_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A generation's folder, as seen without a lock: when anything in it was written last, and what it takes.

    `goes_at` is None as long as it was not delivered.
    """

    generation_id: str
    key: str
    path: Path
    written_at: float
    size_bytes: int
    has_checkpoint: bool
    goes_at: float | None


class FolderLock:
    """A locked folder. `unlock` is idempotent."""

    def __init__(self, path: Path, handle: int) -> None:
        """Take over the handle of the locked folder."""
        self.path = path
        self._handle: int | None = handle

    def unlock(self) -> None:
        """Let others have it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    @property
    def is_held(self) -> bool:
        """Whether it is still locked by us."""
        return self._handle is not None

    def deliver(self, goes_at: float) -> None:
        """Note that it was delivered, and when it is to go; without effect once it is unlocked.

        Raises:
            OSError: the disk does not take it, or the folder is gone.
        """
        if self._handle is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        note = os.open(_DELIVERED, flags, 0o600, dir_fd=self._handle)
        try:
            os.utime(note, (goes_at, goes_at))
        finally:
            os.close(note)


class DurableRoot:
    """The place itself, within the server's own folder. Keeps no state."""

    def __init__(self, state_folder: Path) -> None:
        """Look at nothing yet."""
        self._root = state_folder / OWN_FOLDER

    def make(self, generation_id: str, key: str) -> FolderLock:
        """A new folder, locked. Another server that cleans up may be quicker than the lock: then it is made again.

        Raises:
            OSError: it cannot be made, or somebody else could write into the place.
        """
        make_private_directory(self._root)
        path = self._root / f"{generation_id}-{key}"
        for _ in range(_MAKING_TRIES):
            path.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                lock = self.lock(path)
                if lock is not None:
                    return lock
        raise OSError(errno.EBUSY, "somebody else takes what is made")

    def lock(self, path: Path) -> FolderLock | None:
        """Lock a folder; None when it is locked already, by any process.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be locked.
        """
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), path.lstat()):
                raise FileNotFoundError(errno.ENOENT, "it was made anew")
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        return FolderLock(path, handle)

    def hold(self, found: Found) -> tuple[FolderLock, Found] | None:
        """Lock what was found, and see what it is by now, since others may have had it meanwhile; None while they do.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be locked.
        """
        lock = self.lock(found.path)
        if lock is None:
            return None
        try:
            return lock, _seen(found.path, generation_id=found.generation_id, key=found.key)
        except BaseException:
            lock.unlock()
            raise

    def found(self, *, generation_id: str | None = None, key: str | None = None) -> list[Found]:
        """Generations, all or those of one id or key, and those written last first.

        Raises:
            OSError: the place cannot be read, or is not this user's alone.
        """
        found = []
        for match in self._named(_NAME):
            if generation_id in (None, match[1]) and key in (None, match[2]):
                with suppress(OSError):
                    found.append(_seen(self._root / match[0], generation_id=match[1], key=match[2]))
        return sorted(found, key=lambda one: one.written_at, reverse=True)

    def renew(self, lock: FolderLock) -> None:
        """Have a locked folder, and all that is in it, count as written now, but for when it is to go.

        Raises:
            OSError: it is gone.
        """
        for path in (*lock.path.iterdir(), lock.path):
            if path.name != _DELIVERED:
                os.utime(path, follow_symlinks=False)

    def remove(self, lock: FolderLock, *, leave_mark: bool) -> None:
        """Remove a locked folder with all that is in it, and unlock it. It goes at once or not at all.

        Raises:
            OSError: it stays, or a part of it under a name that nobody looks for.
        """
        doomed = lock.path.with_name(f"{lock.path.name}{_REMOVED_SUFFIX}")
        try:
            if leave_mark:
                with suppress(OSError):  # on a full disk, room matters more
                    self._mark_of(lock.path.name.partition("-")[0]).touch(mode=0o600)
            shutil.rmtree(doomed, ignore_errors=True)
            lock.path.rename(doomed)
            shutil.rmtree(doomed)
        except FileNotFoundError:
            pass
        finally:
            lock.unlock()

    def is_marked(self, generation_id: str) -> bool:
        """Whether a generation was here and is gone. Raises `OSError`."""
        return self._is_ours() and self._mark_of(generation_id).exists()

    def clean(self, older_than: float) -> None:
        """Finish removals that were cut short, and forget what has gone before `older_than`, seconds since the epoch.

        Raises:
            OSError: something stays.
        """
        for match in self._named(_REMOVED):
            shutil.rmtree(self._root / match[0], ignore_errors=True)
        for match in self._named(_MARK):
            with suppress(FileNotFoundError):
                if (self._root / match[0]).lstat().st_mtime < older_than:
                    (self._root / match[0]).unlink()

    def _named(self, form: re.Pattern[str]) -> list[re.Match[str]]:
        if not self._is_ours():
            return []
        with os.scandir(self._root) as entries:
            return [match for entry in entries if (match := form.fullmatch(entry.name))]

    def _mark_of(self, generation_id: str) -> Path:
        return self._root / f"{generation_id}.gone"

    def _is_ours(self) -> bool:
        try:
            if self._root.is_symlink() or not is_private(self._root):
                raise PermissionError(errno.EPERM, f"{OWN_FOLDER} is not a folder of this user alone")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def _seen(path: Path, *, generation_id: str, key: str) -> Found:
    """What the files of a folder say of it by their names, sizes and times.

    Raises:
        OSError: it is gone, or no folder; a link to one is none.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    written_at, size_bytes, has_checkpoint = status.st_mtime, 0, False
    goes_at: float | None = None
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                size_bytes += status.st_size
                has_checkpoint |= HEAD.fullmatch(entry.name) is not None
                if entry.name == _DELIVERED:
                    goes_at = status.st_mtime
                else:
                    written_at = max(written_at, status.st_mtime)
    return Found(
        generation_id=generation_id,
        key=key,
        path=path,
        written_at=written_at,
        size_bytes=size_bytes,
        has_checkpoint=has_checkpoint,
        goes_at=goes_at,
    )
