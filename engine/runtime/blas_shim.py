"""Puts the forwarding shim in front of mlx.

The shim holds the process's only BLAS state: which library it forwards to, and how many products went through.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from engine.runtime.compiled import open_compiled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Weights per tile that a few rows share: within one core's cache, or enough for a threaded sgemv. See decision 0001.
_TILE_ELEMENTS = 1 << 16
_THREADED_TILE_ELEMENTS = 1 << 19

SOURCES = ("blas_threads.c", "blas_rows.c", "host_kernels.c", "blas_shim.c")
FORWARDED = ("cblas_sgemm", "cblas_sgemv", "cblas_dgemm", "cblas_cgemm")


class LoadedShim:
    """The shim that this process has loaded, seen through its exported functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap `library`, which exports the shim's functions."""
        self._library = library
        self._library.mlx_stream_blas_label.restype = ctypes.c_char_p
        self._library.mlx_stream_blas_threads.restype = ctypes.c_int
        self._library.mlx_stream_blas_products.restype = ctypes.c_ulong
        self._library.mlx_stream_blas_few_rows.restype = ctypes.c_int

    @classmethod
    def of_this_process(cls) -> LoadedShim | None:
        """The shim that an earlier call put in front of mlx, if any."""
        process = ctypes.CDLL(None)
        try:
            _ = process.mlx_stream_blas_bind
        except AttributeError:
            return None
        return cls(process)

    @property
    def label(self) -> str:
        """The name that `tune` gave to the library behind it."""
        return bytes(self._library.mlx_stream_blas_label()).decode()

    @property
    def threads(self) -> int:
        """The threads that `tune` was told of."""
        return int(self._library.mlx_stream_blas_threads())

    @property
    def few_rows(self) -> int:
        """Rows up to which a row's bits do not depend on how many others there are."""
        return int(self._library.mlx_stream_blas_few_rows())

    def products(self) -> int:
        """Float32 products that went through the shim so far."""
        return int(self._library.mlx_stream_blas_products())

    def bind(self, functions: Sequence[ctypes.c_void_p]) -> None:
        """Forward to `functions`, those named by `FORWARDED`."""
        self._library.mlx_stream_blas_bind(*functions)

    def tune(self, *, few_rows: int, threads: int, label: str) -> None:
        """Share products among `threads`, and send those of few rows past `sgemm`; remember `label`.

        `few_rows` is how many go to `sgemv` on processors for which we have no kernel; 0 passes everything on as it is.
        """
        tile = _TILE_ELEMENTS if threads == 1 else _THREADED_TILE_ELEMENTS
        numbers = [ctypes.c_int(number) for number in (few_rows, tile, threads)]
        self._library.mlx_stream_blas_tune(*numbers, ctypes.c_char_p(label.encode()))


def load_shim(directory: Path) -> LoadedShim:
    """Open the shim for the whole process, compiling it into `directory` when it is not there yet.

    Raises:
        CannotCompileError: there is no C compiler, it failed, or the result cannot be loaded.
    """
    return LoadedShim(open_compiled(*SOURCES, directory=directory, mode=ctypes.RTLD_GLOBAL))
