"""Compiles the C sources that lie beside this file, once, and keeps them where nobody else can write.

A machine without a C compiler loses speed and nothing else: every caller has another way.
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
from typing import Final

from engine.runtime.private_directory import make_private_directory

_COMPILERS: Final = ("cc", "gcc", "clang")
# Without contraction a product and a sum are rounded apart on every processor.
_FLAGS: Final = ("-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
_COMPILE_SECONDS: Final = 60


class CannotCompileError(Exception):
    """A source cannot be made into a library here. `str(error)` says why; it never leaves `engine.runtime`."""


def open_compiled(*source_names: str, directory: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Open the library of `source_names`, compiling it into `directory` when it is not there yet.

    Args:
        source_names: C files of this package, compiled as one; the last one names the library.
        directory: private folder that keeps it.
        mode: `ctypes.RTLD_GLOBAL` lends its names to the whole process.

    Raises:
        CannotCompileError: there is no C compiler, it failed, or the result cannot be loaded.
    """
    package = importlib.resources.files("engine.runtime")
    source = b"\n".join(package.joinpath(name).read_bytes() for name in source_names)
    stem = source_names[-1].removesuffix(".c")
    try:
        return _open_kept(source, stem, make_private_directory(directory), mode)
    except OSError:
        # No folder to keep it in, or none that code may be loaded from: make it for this process alone.
        with tempfile.TemporaryDirectory(prefix="mlx-stream-") as scratch:
            return _open_kept(source, stem, Path(scratch), mode)


def compile_library(source: bytes, path: Path) -> None:
    """Compile `source` into the shared library `path`, atomically: others see the whole file or none.

    Raises:
        CannotCompileError: there is no C compiler, or it failed.
        OSError: the folder of `path` cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CannotCompileError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(made)]
        try:
            subprocess.run(command, input=source, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise CannotCompileError(f"the C compiler failed: {_complaint(error)}") from error
        made.replace(path)


def _open_kept(source: bytes, stem: str, directory: Path, mode: int) -> ctypes.CDLL:
    path = directory / f"{stem}-{_fingerprint(source)}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path), mode=mode)
        except OSError:
            path.unlink()  # cut short by a full disk, or made for another machine: make it anew
    compile_library(source, path)
    return ctypes.CDLL(str(path), mode=mode)


def _fingerprint(source: bytes) -> str:
    """What the compiled file depends on; the extension suffix names the processor family and the C library."""
    facts = (source, " ".join(_FLAGS).encode(), importlib.machinery.EXTENSION_SUFFIXES[0].encode())
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]


def _complaint(error: Exception) -> str:
    """The compiler's first line about an error, or what kind of failure it was."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = bytes(output or b"").decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line), type(error).__name__)
