"""Puts an optimized BLAS in front of mlx on Linux CPUs, before mlx is imported, and tells which one is live.

mlx bundles an unoptimized BLAS there. The names of a library that was opened globally earlier win over it, so the
choice is made once per process and cannot be changed afterwards. Source: decision 0001.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.contracts.errors import ConfigurationError
from engine.runtime.blas_library import (
    BlasLibrary,
    BlasUnusableError,
    library_of_this_process,
    open_library,
    open_mkl,
    open_system,
    open_wheel,
)
from engine.runtime.blas_shim import FORWARDED, LoadedShim, load_shim
from engine.runtime.compiled import CannotCompileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Opener = Callable[[], BlasLibrary]

logger = logging.getLogger(__name__)

REMEDY = (
    "install a C compiler, which lets the scipy-openblas32 package serve, or the system's OpenBLAS "
    "(Debian and Ubuntu: apt-get install libopenblas0-pthread)"
)
TOO_LATE = "start the engine before anything else imports mlx"

# GFLOP/s: above what the bundled BLAS reaches, below what an optimized one does.
OPTIMIZED_GIGAFLOPS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """The BLAS behind float32 products. `threads` is 0 where the library does not say.

    `shim`: products pass through our forwarding shim, which sends those of few rows to `sgemv`. `remedy` says what
    makes products fast where they are not.
    """

    name: str
    threads: int = 0
    optimized: bool = False
    shim: bool = False
    remedy: str = ""

    def describe(self) -> str:
        """One line for logs and callers."""
        facts = [self.name]
        if self.threads:
            facts.append("1 thread" if self.threads == 1 else f"{self.threads} threads")
        if self.shim:
            facts.append("few-row shim")
        return ", ".join(facts)


BUNDLED = BlasReport(name="bundled with mlx", remedy=REMEDY)


def default_openers() -> Mapping[str, Opener]:
    """Where a BLAS is looked for, best first: the wheel is one tested version, and knows new processors."""
    return {"scipy-openblas32": open_wheel, "openblas": open_system, "mkl": open_mkl}


def prepare_blas(wish: str | None, *, thread_wish: int | None, usable_cores: int, shim_directory: Path) -> BlasReport:
    """Put the wished BLAS, or the best at hand, in front of mlx. Call before mlx is imported; again is harmless.

    Args:
        wish: a key of `default_openers`, a library's path, "none", or None or "auto" for the first usable.
        thread_wish: threads to use; None leaves the library's own choice, within `usable_cores`.
        usable_cores: physical cores that the process may use.
        shim_directory: private folder that keeps the compiled shim.

    Raises:
        ConfigurationError: the wished library cannot be used.
    """
    present = _already_in_front()
    if present is not None:
        return present
    if "mlx.core" in sys.modules:
        return replace(BUNDLED, remedy=TOO_LATE)
    return resolve_blas(
        wish,
        default_openers(),
        lambda library: _put_in_front(library, thread_wish, usable_cores, shim_directory),
    )


def resolve_blas(
    wish: str | None, openers: Mapping[str, Opener], put_in_front: Callable[[BlasLibrary], BlasReport]
) -> BlasReport:
    """Open libraries in the order of `openers` until one can be put in front; a wish is tried alone.

    Raises:
        ConfigurationError: the wished library cannot be used.
    """
    if wish == "none":
        return BUNDLED
    if wish is not None and wish != "auto":
        return _wished(wish, openers, put_in_front)
    for name, opener in openers.items():
        try:
            return put_in_front(opener())
        except BlasUnusableError as error:
            logger.info("BLAS %s is passed over: %s", name, error)
    return BUNDLED


def count_products() -> int:
    """Float32 products that went through the shim so far; 0 without one."""
    shim = LoadedShim.of_this_process()
    return shim.products() if shim is not None else 0


def confirm_blas(report: BlasReport, *, counted: bool, gigaflops: float) -> BlasReport:
    """The report once mlx has computed: the shim `counted` products, or they ran at an optimized rate."""
    optimized = counted or gigaflops >= OPTIMIZED_GIGAFLOPS
    return replace(report, shim=counted, optimized=optimized, remedy="" if optimized else report.remedy or REMEDY)


def _already_in_front() -> BlasReport | None:
    shim = LoadedShim.of_this_process()
    if shim is not None:
        return BlasReport(name=shim.label, threads=shim.threads, shim=True)
    library = library_of_this_process()
    return BlasReport(name=library.describe(), threads=library.threads()) if library is not None else None


def _wished(wish: str, openers: Mapping[str, Opener], put_in_front: Callable[[BlasLibrary], BlasReport]) -> BlasReport:
    opener = openers.get(wish, lambda: open_library(wish))
    try:
        return put_in_front(opener())
    except BlasUnusableError as error:
        known = ", ".join(["auto", "none", *openers])
        file = wish.rpartition("/")[2]
        raise ConfigurationError("blas", f"{file} ({error}); choose {known} or a library's path") from None


def _put_in_front(library: BlasLibrary, thread_wish: int | None, usable_cores: int, directory: Path) -> BlasReport:
    functions = [library.address(name) for name in FORWARDED]
    try:
        shim = load_shim(directory)
    except CannotCompileError as error:
        return _open_globally(library, error, library.set_threads(thread_wish, usable_cores))
    # First of all, since MKL opens its own names globally as soon as it is asked anything.
    shim.bind(functions)
    report = BlasReport(name=library.describe(), threads=library.set_threads(thread_wish, usable_cores), shim=True)
    library.set_threads(1, 1)  # the shim's own threads share the work: they leave a busy machine to others
    shim.tune(few_rows=library.few_rows, threads=report.threads, label=report.name)
    return report


def _open_globally(library: BlasLibrary, why_no_shim: CannotCompileError, threads: int) -> BlasReport:
    if library.prefix:
        raise BlasUnusableError(f"its functions must be forwarded, and {why_no_shim}")
    ctypes.CDLL(library.file, mode=ctypes.RTLD_GLOBAL)
    return BlasReport(name=library.describe(), threads=threads)
