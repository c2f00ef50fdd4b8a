"""Compiles the forwarding shim once, keeps it, and puts it in front of mlx.

The shim holds the process's only BLAS state: which library it forwards to, and how many products went through.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.resources
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from engine.runtime.private_directory import make_private_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-fPIC", "-shared")
_COMPILE_SECONDS = 60

# Weights per tile that a few rows share: within one core's cache, or enough for a threaded sgemv. See decision 0001.
_TILE_ELEMENTS = 1 << 16
_THREADED_TILE_ELEMENTS = 1 << 19

FORWARDED = ("cblas_sgemm", "cblas_sgemv", "cblas_dgemm", "cblas_cgemm")


class ShimUnavailableError(Exception):
    """The shim cannot be made here. `str(error)` says why; it never leaves `engine.runtime`."""


class LoadedShim:
    """The shim that this process has loaded, seen through its exported functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap `library`, which exports the shim's functions."""
        self._library = library
        self._library.mlx_stream_blas_label.restype = ctypes.c_char_p
        self._library.mlx_stream_blas_threads.restype = ctypes.c_int
        self._library.mlx_stream_blas_products.restype = ctypes.c_ulong

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

    def products(self) -> int:
        """Float32 products that went through the shim so far."""
        return int(self._library.mlx_stream_blas_products())

    def bind(self, functions: Sequence[ctypes.c_void_p]) -> None:
        """Forward to `functions`, those named by `FORWARDED`."""
        self._library.mlx_stream_blas_bind(*functions)

    def tune(self, *, few_rows: int, threads: int, label: str) -> None:
        """Send products of up to `few_rows` rows to `sgemv`; remember `threads` and `label`."""
        tile = _TILE_ELEMENTS if threads == 1 else _THREADED_TILE_ELEMENTS
        numbers = [ctypes.c_int(number) for number in (few_rows, tile, threads)]
        self._library.mlx_stream_blas_tune(*numbers, ctypes.c_char_p(label.encode()))


def load_shim(directory: Path) -> LoadedShim:
    """Open the shim for the whole process, compiling it into `directory` when it is not there yet.

    Raises:
        ShimUnavailableError: there is no C compiler, it failed, or the result cannot be loaded.
    """
    source = importlib.resources.files("engine.runtime").joinpath("blas_shim.c").read_bytes()
    try:
        return _load_kept(source, make_private_directory(directory))
    except OSError:
        # No folder to keep it in, or none that code may be loaded from: make it for this process alone.
        with tempfile.TemporaryDirectory(prefix="mlx-stream-") as scratch:
            return _load_kept(source, Path(scratch))


def _load_kept(source: bytes, directory: Path) -> LoadedShim:
    path = directory / f"blas-{_fingerprint(source)}.so"
    if path.exists():
        try:
            return _open_for_process(path)
        except OSError:
            path.unlink()  # cut short by a full disk, or made for another machine: make it anew
    compile_shim(source, path)
    return _open_for_process(path)


def _open_for_process(path: Path) -> LoadedShim:
    return LoadedShim(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))


def compile_shim(source: bytes, path: Path) -> None:
    """Compile `source` into the shared library `path`, atomically: others see the whole file or none.

    Raises:
        ShimUnavailableError: there is no C compiler, or it failed.
        OSError: the folder of `path` cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ShimUnavailableError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(made)]
        try:
            subprocess.run(command, input=source, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise ShimUnavailableError(f"the C compiler failed: {_complaint(error)}") from error
        made.replace(path)


def _fingerprint(source: bytes) -> str:
    """What the compiled file depends on; the extension suffix names the processor family and the C library."""
    facts = (source, " ".join(_FLAGS).encode(), importlib.machinery.EXTENSION_SUFFIXES[0].encode())
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]


def _complaint(error: Exception) -> str:
    """The compiler's first line about an error, or what kind of failure it was."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = bytes(output or b"").decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line), type(error).__name__)
