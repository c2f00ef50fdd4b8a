"""Listening on a Unix-domain socket: who may connect is decided by the file's permissions.

A socket that a dead server has left behind is removed; anything else that stands at the path is left alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service.address import AddressError, BindError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "unix:"
# What the operating system has room for, without the terminating zero.
MAX_PATH_BYTES: Final = 103 if sys.platform == "darwin" else 107
OWNER_ALONE: Final = 0o600
PROBE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixAddress:
    """The path of a socket, and its permissions as `chmod` takes them."""

    path: Path
    mode: int = OWNER_ALONE

    @classmethod
    def parse(cls, text: str, *, mode: int = OWNER_ALONE) -> UnixAddress:
        """Read unix:PATH.

        Raises:
            AddressError: there is no path, or it is too long for a socket.
        """
        path = text.removeprefix(PREFIX)
        if not path or "\0" in path:
            raise AddressError(f"{text!r} is not unix:PATH, such as unix:/run/mlx-stream.sock")
        size_bytes = len(os.fsencode(path))
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
    def binding(self) -> Iterator[None]:
        """Around the call that makes the socket: it is never open to more users than `mode` says."""
        before = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(before)
        self.path.chmod(self.mode)

    def bound(self, _port: int) -> UnixAddress:
        """The address after binding."""
        return self

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
