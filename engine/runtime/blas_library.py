"""Finds and opens BLAS libraries: a path, a PyPI wheel, the system's OpenBLAS, MKL.

Opening alone changes nothing for mlx: each is opened for ourselves, and `engine.runtime.blas` puts one in front.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Rows up to which the wheel's sgemv beats its sgemm on every processor that was measured. See decision 0001.
FEW_ROWS = 4

_PREFIXES = ("", "scipy_")
# Fedora's plain name is the single-threaded build, so the pthread build is asked for first.
_SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")

_THREAD_FUNCTIONS = (
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)


class BlasUnusableError(Exception):
    """This library cannot serve. `str(error)` says why; it never leaves `engine.runtime`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasLibrary:
    """An opened BLAS with 32-bit integers. Its functions carry `prefix`, as in `scipy_cblas_sgemm`.

    `few_rows` is the number of rows up to which its sgemv is taken to beat its sgemm.
    """

    file: str
    handle: ctypes.CDLL
    prefix: str
    few_rows: int = 1

    def function(self, name: str) -> Any:
        """The function `name`, prefix added.

        Raises:
            BlasUnusableError: it is not there.
        """
        try:
            return getattr(self.handle, self.prefix + name)
        except AttributeError:
            raise BlasUnusableError(f"it has no {name}") from None

    def address(self, name: str) -> ctypes.c_void_p:
        """Where the function `name` is.

        Raises:
            BlasUnusableError: it is not there.
        """
        return ctypes.cast(self.function(name), ctypes.c_void_p)

    def threads(self) -> int:
        """Threads in use; 0 where the library does not say."""
        functions = self._thread_functions()
        return int(functions[0]()) if functions is not None else 0

    def set_threads(self, wish: int | None, usable_cores: int) -> int:
        """Use `wish` threads, or the library's own choice within `usable_cores`; returns `threads()`."""
        functions = self._thread_functions()
        if functions is None:
            return 0
        read, write = functions
        write(ctypes.c_int(wish or min(int(read()), usable_cores)))
        return int(read())

    def describe(self) -> str:
        """Name, version and kernel, as far as the library tells."""
        config = self.openblas_text("openblas_get_config").split()
        if len(config) > 1:
            return f"{config[0]} {config[1]} ({self.openblas_text('openblas_get_corename')} kernels)"
        return "MKL" if "mkl" in self.file else Path(self.file).name or "a preloaded BLAS"

    def openblas_text(self, name: str) -> str:
        """What OpenBLAS's function `name` says of itself; "" for another library."""
        try:
            function = self.function(name)
        except BlasUnusableError:
            return ""
        function.restype = ctypes.c_char_p
        return bytes(function()).decode(errors="replace")

    def _thread_functions(self) -> tuple[Any, Any] | None:
        for getter, setter in _THREAD_FUNCTIONS:
            try:
                return self.function(getter), self.function(setter)
            except BlasUnusableError:
                continue
        return None


def library_of_this_process() -> BlasLibrary | None:
    """The BLAS whose names are visible to all of the process: preloaded, or opened globally by an earlier call."""
    library = BlasLibrary(file="", handle=ctypes.CDLL(None), prefix="")
    try:
        library.function("cblas_sgemm")
    except BlasUnusableError:
        return None
    return library


def open_library(file: str, *, few_rows: int = 1) -> BlasLibrary:
    """Open `file`, a path or a name that the system's loader knows.

    Raises:
        BlasUnusableError: it cannot be opened, or is no BLAS with 32-bit integers.
    """
    try:
        handle = ctypes.CDLL(file)
    except OSError:
        raise BlasUnusableError("it cannot be opened as a shared library") from None
    for prefix in _PREFIXES:
        library = BlasLibrary(file=file, handle=handle, prefix=prefix, few_rows=few_rows)
        try:
            library.function("cblas_sgemm")
        except BlasUnusableError:
            continue
        if "USE64BITINT" in library.openblas_text("openblas_get_config"):
            raise BlasUnusableError("it uses 64-bit integers, and mlx 32-bit ones")
        return library
    raise BlasUnusableError("it has no cblas_sgemm")


def open_wheel() -> BlasLibrary:
    """The OpenBLAS inside the PyPI package `scipy-openblas32`; it is found without being imported.

    Raises:
        BlasUnusableError: it is not installed or cannot be opened.
    """
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("lib/libscipy_openblas*.so")):
            return open_library(str(file), few_rows=FEW_ROWS)
    raise BlasUnusableError("it is not installed")


def open_system() -> BlasLibrary:
    """The system's OpenBLAS.

    Raises:
        BlasUnusableError: there is none.
    """
    for name in _SYSTEM_NAMES:
        try:
            return open_library(name)
        except BlasUnusableError:
            continue
    raise BlasUnusableError("it is not installed")


def open_mkl() -> BlasLibrary:
    """The runtime of the PyPI package `mkl`.

    Raises:
        BlasUnusableError: it is not installed or cannot be opened.
    """
    try:
        distribution = importlib.metadata.distribution("mkl")
    except importlib.metadata.PackageNotFoundError:
        raise BlasUnusableError("it is not installed") from None
    for file in distribution.files or ():
        if file.name.startswith("libmkl_rt.so"):
            return open_library(os.path.realpath(str(distribution.locate_file(file))))
    raise BlasUnusableError("it brings no libmkl_rt")
