"""A file of records that are only ever appended, each tied to all before it by its checksum.

What a killed process has written is whole but for the last record at most: the rest is cut when the file is opened
again. Nothing is synced, so a machine that loses power may lose the newest records too. Damage anywhere ends the file
there: what stands before it can be trusted, what follows is dropped. A file that lacks records which its writer could
not write ends in the middle of one, so that it shows. Knows nothing of what records hold. Units: bytes.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

BEGINNING: Final = b"mlx-stream tokens 1\n"
MAX_LOG_BYTES: Final = 256 * 1024 * 1024
"""A log that grows beyond this is written no further; a longer file is none of ours."""
MAX_UNWRITTEN_BYTES: Final = 4 * 1024 * 1024
"""What may wait for room on a full disk before a log is given up."""
# Length of the payload, checksum of everything up to its end, kind.
_FRAME: Final = struct.Struct("<IIB")


class RecordKind(enum.IntEnum):
    """What a record holds; the numbers are part of the format."""

    HEADER = 1
    STARTED = 2
    TOKENS = 3
    MARK = 4
    FINISHED = 5
    MACHINE = 7


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

    kind: RecordKind
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContent:
    """The trustworthy beginning of a file: its records, where it ends, and whether anything follows it.

    `is_damaged` when what follows is more than the beginning of a record, or room that was never written.
    """

    records: tuple[Record, ...]
    good_bytes: int
    checksum: int
    is_whole: bool
    is_damaged: bool


def read_log_file(path: Path) -> LogContent:
    """Everything up to the first record that is cut or damaged.

    Raises:
        OSError: there is no such file, or it is no regular file of this user.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path.name} is no regular file of this user")
        content = file.read(MAX_LOG_BYTES + 1)
    records, at, checksum = [], 0, 0
    if content.startswith(BEGINNING):
        at, checksum = len(BEGINNING), zlib.crc32(BEGINNING)
        for record, end, checksum_there in _records(content, at, checksum):
            records.append(record)
            at, checksum = end, checksum_there
    return LogContent(
        records=tuple(records),
        good_bytes=at,
        checksum=checksum,
        is_whole=at == len(content),
        is_damaged=not _is_cut(content[at:]),
    )


class LogFile:
    """The writing end of a log. What cannot be written now is kept and tried again with the next record."""

    def __init__(self, path: Path, after: LogContent | None = None) -> None:
        """Begin a new file, or append to the one whose content is `after`, once the rest of it is cut off.

        Where something is cut off the file stays cut, by a byte, until the next record is there.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._name = path.name
        self._unwritten = bytearray()
        self._failed = False
        self._rests = False
        self._descriptor: int | None = self._opened(os.O_CREAT)
        self._written_bytes = 0 if after is None else after.good_bytes
        self._record_ends = {self._written_bytes}
        if after is not None and not after.is_whole:
            self._show_lack()
        os.ftruncate(self._descriptor, self._written_bytes)
        if self._written_bytes:
            self._checksum = 0 if after is None else after.checksum
        else:
            self._checksum = zlib.crc32(BEGINNING)
            self._unwritten += BEGINNING
            self._write()

    def append(self, kind: RecordKind, payload: bytes) -> None:
        """Add a record. Never raises: a disk that fails is told of once, and the generation goes on."""
        self._wake()
        if self._descriptor is None:
            return
        frame, self._checksum = _framed(kind, payload, self._checksum)
        self._unwritten += frame
        self._record_ends.add(self._written_bytes + len(self._unwritten))
        self._write()

    @property
    def is_written(self) -> bool:
        """Whether the file holds all records."""
        return self._descriptor is not None and not self._unwritten

    def rest(self) -> None:
        """Hold no descriptor until the next record; without effect while something is to be written."""
        if self.is_written and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._rests = None, True

    def _wake(self) -> None:
        if self._rests:
            self._rests = False
            try:
                self._descriptor = self._opened()
            except OSError as error:
                logger.warning("%s is written no further (%s)", self._name, error.strerror)
                with contextlib.suppress(OSError):
                    os.truncate(self._path, self._written_bytes - 1)  # so that it shows

    def _opened(self, more_flags: int = 0) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags
        return os.open(self._path, flags, 0o600)

    def close(self) -> None:
        """Let go of the file. Idempotent; what could not be written is lost."""
        descriptor, self._descriptor = self._descriptor, None
        self._rests = False
        self._unwritten = bytearray()
        if descriptor is not None:
            os.close(descriptor)

    def _write(self) -> None:
        if self._descriptor is None:
            return
        try:
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten)
                del self._unwritten[:written]
                self._written_bytes += written
            self._record_ends = {self._written_bytes}
        except OSError as error:
            self._show_lack()
            if not self._failed:
                self._failed = True
                logger.warning("%s cannot be written (%s): what it lacks cannot be resumed", self._name, error.strerror)
        if len(self._unwritten) > MAX_UNWRITTEN_BYTES or self._written_bytes > MAX_LOG_BYTES:
            logger.warning("%s is written no further: it has no room", self._name)
            self._show_lack()
            self.close()

    def _show_lack(self) -> None:
        """Take the last byte back if the file ends with a whole record: it looked as if nothing were missing."""
        if self._descriptor is None or not self._written_bytes or self._written_bytes not in self._record_ends:
            return
        with contextlib.suppress(OSError):
            last = os.pread(self._descriptor, 1, self._written_bytes - 1)
            os.ftruncate(self._descriptor, self._written_bytes - 1)
            self._written_bytes -= 1
            self._unwritten[:0] = last


def _framed(kind: RecordKind, payload: bytes, checksum: int) -> tuple[bytes, int]:
    """A record as it lies in the file, and the checksum that it ends with; `checksum` is that of all before it."""
    checksum = _chained(kind, payload, checksum)
    return _FRAME.pack(len(payload), checksum, kind) + payload, checksum


def _chained(kind: int, payload: bytes | memoryview, checksum: int) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<IB", len(payload), kind), checksum))


def _is_cut(rest: bytes) -> bool:
    """Whether `rest`, which is no record, is what is left of one whose end was never written: cut short, or zeros."""
    if len(rest) < _FRAME.size or not any(rest):
        return True
    length, _, kind = _FRAME.unpack_from(rest)
    return (kind in set(RecordKind) and _FRAME.size + length > len(rest)) or not any(rest[-_FRAME.size :])


def _records(content: bytes, at: int, checksum: int) -> Iterator[tuple[Record, int, int]]:
    """The records from `at` on, each with its end and its checksum, as long as they are sound."""
    kinds = {int(kind) for kind in RecordKind}
    view = memoryview(content)
    while at + _FRAME.size <= len(content):
        length, stated, kind = _FRAME.unpack_from(content, at)
        end = at + _FRAME.size + length
        if kind not in kinds or end > len(content):
            return
        payload = view[at + _FRAME.size : end]
        checksum = _chained(kind, payload, checksum)
        if checksum != stated:
            return
        yield Record(RecordKind(kind), bytes(payload)), end, checksum
        at = end
