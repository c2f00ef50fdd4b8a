"""Arrays whose memory nobody has touched yet, for whoever fills them from outside of mlx.

`mx.zeros` visits all of its memory, and a load that fills it visits it again. mlx reads a file object straight into an
array's own memory and takes its word for what was written there; should it once read in another way, what is here costs
time and stays right. On large pages products are a tenth faster, as long as the model serves. Source: decision 0025.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import TYPE_CHECKING, Final, cast

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

STRETCH_VALUES: Final = 1 << 24
ALIGNMENT_VALUES: Final = 16
"""A line of a processor's cache."""

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_ALIGNMENT_BYTES: Final = 64
_LENGTH_BYTES: Final = 2


class UntouchedMemory:
    """Hands out matrices side by side: apart, most are too small for large pages of their own."""

    def __init__(self, stretch_values: int = STRETCH_VALUES) -> None:
        """Take stretches of so many values from mlx, none before it is needed."""
        self._stretch_values = stretch_values
        self._stretch: mx.array | None = None
        self._used_values = 0

    def matrix(self, rows: int, columns: int) -> mx.array:
        """An evaluated matrix [rows, columns] that holds anything; its stretch lives as long as any matrix in it."""
        values = rows * columns
        if self._stretch is None or self._used_values + values > self._stretch.size:
            self._stretch, self._used_values = untouched((max(values, self._stretch_values),)), 0
        start = self._used_values
        self._used_values += values + -values % ALIGNMENT_VALUES
        matrix = self._stretch[start : start + values].reshape(rows, columns)
        mx.eval(matrix)
        return matrix


def untouched(shape: Sequence[int]) -> mx.array:
    """An evaluated float32 array of `shape` that holds anything, on large pages where the system has them."""
    return cast("mx.array", mx.load(_UnreadFile(shape), format="npy"))  # type: ignore[arg-type]


class _UnreadFile:
    """A file in numpy's format, of which only the header can be read. Source: the npy format, version 1.0."""

    closed = False

    def __init__(self, shape: Sequence[int]) -> None:
        facts = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
        before = len(_MAGIC) + _LENGTH_BYTES + len(facts) + 1
        header = facts + " " * (-before % _ALIGNMENT_BYTES) + "\n"
        self._header = _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header.encode("ascii")
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset if whence == os.SEEK_SET else self._at + offset
        return self._at

    def readinto(self, memory: memoryview) -> int:
        """Give the next bytes of the header, or leave an array's memory as it is."""
        if self._at < len(self._header):
            memory[:] = self._header[self._at : self._at + len(memory)]
        else:
            _ask_for_large_pages(memory)
        self._at += len(memory)
        return len(memory)


def _ask_for_large_pages(memory: memoryview) -> None:
    """Advice that a system may decline: a page of 2 MiB is touched once where 512 small ones would be."""
    if sys.platform != "linux":
        return
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin, end = first + -first % mmap.PAGESIZE, first + len(memory)
    if begin < end:
        length = ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, ctypes.c_int(mmap.MADV_HUGEPAGE))
