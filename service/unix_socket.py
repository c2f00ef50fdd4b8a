"""Listening on a Unix-domain socket: who may connect is decided by the file's permissions.

A socket that a dead server has left behind is removed; anything else that stands at the path is left alone. gRPC makes
the socket under another name, since it removes, at its end, whatever stands where it was made: by then that may be
another server's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service.address import AddressError, BindError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "unix:"
# What the operating system has room for, without the terminating zero.
MAX_PATH_BYTES: Final = 103 if sys.platform == "darwin" else 107
# Room for the name under which a socket is made.
MAX_FOLDER_BYTES: Final = MAX_PATH_BYTES - len("/.01234567")
# What gRPC, and clients, do not take for part of a path.
URI_CHARACTERS: Final = "%?#"
OWNER_ALONE: Final = 0o600
PROBE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixAddress:
    """The path of a socket, and its permissions as `chmod` takes them; `made` tells our socket there from others."""

    path: Path
    mode: int = OWNER_ALONE
    made: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str, *, mode: int = OWNER_ALONE) -> UnixAddress:
        """Read unix:PATH.

        Raises:
            AddressError: there is no path, clients could not name it, or it is too long for a socket.
        """
        path = text.removeprefix(PREFIX)
        if not path or "\0" in path:
            raise AddressError(f"{text!r} is not unix:PATH, such as unix:/run/mlx-stream.sock")
        strange = next((character for character in URI_CHARACTERS if character in path), None)
        if strange is not None:
            raise AddressError(f"the path of a socket must not hold {strange!r}: clients would read it as a URI's")
        size_bytes, folder_bytes = len(os.fsencode(path)), len(os.fsencode(Path(path).parent))
        if folder_bytes > MAX_FOLDER_BYTES:
            raise AddressError(f"the folder of a socket has at most {MAX_FOLDER_BYTES} bytes, got {folder_bytes}")
        if size_bytes > MAX_PATH_BYTES:
            raise AddressError(f"the path of a socket has at most {MAX_PATH_BYTES} bytes, got {size_bytes}")
        return cls(path=Path(path), mode=mode)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: always."""
        return True

    def __str__(self) -> str:
        """unix:PATH, as it can be typed."""
        return f"{PREFIX}{self.path}"

    def require_bindable(self) -> None:
        """Look at the path, and remove a socket there that nobody listens on.

        Raises:
            BindError: the folder cannot be written to, or something else is at the path.
        """
        folder = self.path.parent
        if not folder.is_dir():
            raise BindError(f"cannot listen on {self}: there is no such folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BindError(f"cannot listen on {self}: the folder cannot be written to")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise BindError(f"cannot listen on {self}: something that is no socket is there")
            if self._is_answered():
                raise BindError(f"cannot listen on {self}: another server listens there")
            self.path.unlink()

    @contextlib.contextmanager
    def binding(self) -> Iterator[str]:
        """Around the call that makes the socket, which is told where: it is never open to more than `mode` says."""
        making, before = self.path.with_name(f".{secrets.token_hex(4)}"), os.umask(0o177)
        try:
            yield f"{PREFIX}{making}"
        finally:
            os.umask(before)
        making.chmod(self.mode)
        making.rename(self.path)

    def bound(self, _port: int) -> UnixAddress:
        """The address after binding."""
        return replace(self, made=_identity(self.path))

    def release(self) -> None:
        """Remove the socket, unless another one stands there by now."""
        with contextlib.suppress(OSError):
            if self.made == _identity(self.path):
                self.path.unlink()

    def _is_answered(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                return False
            except OSError:
                return True  # a full queue, or no permission to knock: somebody may be there
            return True


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
