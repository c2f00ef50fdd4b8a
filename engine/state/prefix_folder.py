"""The folder of kept prefixes: where each file lies, and which files may be read or removed.

Entries lie in FOLDER/mlx-stream-prefixes/CONFIGURATION/NAMESPACE/, named by digests alone. That sub-folder is made with
mode 0700, and nothing in it is trusted unless it still is this user's alone; the operator's own folder keeps its mode.
What is not named as we name, or does not begin as we write, is never touched. Each file is handled by itself: one that
cannot be read, or goes meanwhile, costs nothing but itself. Touches no array and keeps no state. Units: bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from engine.runtime.private_directory import is_private, make_private_directory
from engine.state.prefix_file import FORMAT
from engine.state.state_file import PARTIAL_SUFFIX, SUFFIX, is_of_format, remove_if_orphaned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OWN_FOLDER: Final = "mlx-stream-prefixes"
DIGEST: Final = re.compile(r"[0-9a-f]{32}")
ENTRY: Final = re.compile(DIGEST.pattern + re.escape(SUFFIX))
PARTIAL: Final = re.compile(DIGEST.pattern + r"-[0-9a-f]{16}" + re.escape(PARTIAL_SUFFIX))


class PrefixFolder:
    """What lies in the operator's folder and is ours. `warn` takes what cannot be done, and why."""

    def __init__(self, folder: Path, warn: Callable[[str, OSError], None]) -> None:
        """Look at nothing yet."""
        self._root = folder / OWN_FOLDER
        self._warn = warn

    def path(self, identity: str, namespace: str, key: bytes) -> Path:
        """Where the entry for `key` lies; `identity` is a digest already."""
        return self._root / identity / digest(namespace.encode("utf-8")) / f"{digest(key)}{SUFFIX}"

    def is_ours(self) -> bool:
        """Whether there is a folder, and nobody else can have written into it; a warning tells of one that is not."""
        try:
            if self._root.is_symlink() or not is_private(self._root):
                raise PermissionError(f"{OWN_FOLDER} is not a folder of this user alone")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._warn("kept prefixes are not read from disk", error)
            return False
        return True

    def make_place(self, path: Path) -> None:
        """Make the folders that `path` lies in.

        Raises:
            OSError: they cannot be made, or somebody else can write into ours.
        """
        make_private_directory(self._root)
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)

    def entries(self, identity: re.Pattern[str] = DIGEST) -> Iterator[Path]:
        """Every file that is named like an entry, of configurations whose digest matches."""
        return self._files(ENTRY, identity)

    def uses(self) -> Iterator[tuple[int, int, Path]]:
        """When each entry was used last, its size, and where it is."""
        for path in self.entries():
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, status.st_size, path

    def size(self, path: Path) -> int:
        """Bytes of an entry; 0 when it is gone."""
        with suppress(OSError):
            return path.lstat().st_size
        return 0

    def remove(self, path: Path) -> bool:
        """Remove an entry; returns whether it is gone. What we have not written stays."""
        try:
            if not is_of_format(path, FORMAT):
                return False
            path.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            self._warn("kept prefixes cannot be removed from disk", error)
            return False
        return True

    def remove_orphans(self) -> None:
        """Remove what writers that were killed have left."""
        for path in self._files(PARTIAL, DIGEST):
            try:
                remove_if_orphaned(path)
            except OSError as error:
                self._warn("what a writer has left cannot be removed from disk", error)

    def _files(self, form: re.Pattern[str], identity: re.Pattern[str]) -> Iterator[Path]:
        for configuration in self._named(self._root, identity):
            for namespace in self._named(configuration, DIGEST):
                yield from self._named(namespace, form)

    def _named(self, folder: Path, form: re.Pattern[str]) -> list[Path]:
        """What `folder` holds under names of this form; nothing if it is a link or no folder."""
        try:
            if folder.is_symlink():
                return []
            with os.scandir(folder) as found:
                return sorted(folder / entry.name for entry in found if form.fullmatch(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._warn("kept prefixes are not read from disk", error)
            return []


def digest(content: bytes) -> str:
    """The name of something in the folder."""
    return hashlib.sha256(content).hexdigest()[:32]
