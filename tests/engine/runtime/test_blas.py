"""Which BLAS is put in front of mlx: the order, wishes, fallbacks, and the truth about the outcome."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from engine.contracts.errors import ConfigurationError
from engine.runtime.blas import BUNDLED, BlasReport, confirm_blas, default_openers, resolve_blas
from engine.runtime.blas_library import BlasLibrary, BlasUnusableError


def opener(file: str, *, usable: bool = True) -> Callable[[], BlasLibrary]:
    def open_it() -> BlasLibrary:
        if not usable:
            raise BlasUnusableError("it is not installed")
        return BlasLibrary(file=file, handle=ctypes.CDLL(None), prefix="")

    return open_it


def put_in_front(library: BlasLibrary) -> BlasReport:
    if library.file == "prefixed":
        raise BlasUnusableError("its functions must be forwarded, and there is no C compiler")
    return BlasReport(name=library.file)


def test_the_default_order_is_the_measured_one() -> None:
    assert list(default_openers()) == ["scipy-openblas32", "openblas", "mkl"]


@pytest.mark.parametrize("wish", [None, "auto"])
def test_the_first_usable_library_is_chosen(wish: str | None) -> None:
    openers = {"a": opener("a", usable=False), "b": opener("b"), "c": opener("c")}
    assert resolve_blas(wish, openers, put_in_front).name == "b"


def test_a_library_that_opens_but_cannot_be_put_in_front_is_passed_over() -> None:
    openers = {"a": opener("prefixed"), "b": opener("b")}
    assert resolve_blas(None, openers, put_in_front).name == "b"


def test_without_any_library_the_bundled_one_serves_and_a_remedy_is_named() -> None:
    report = resolve_blas(None, {"a": opener("a", usable=False)}, put_in_front)
    assert report == BUNDLED
    assert "libopenblas0-pthread" in report.remedy
    assert "C compiler" in report.remedy


def test_a_wish_is_tried_alone() -> None:
    openers = {"a": opener("a"), "b": opener("b", usable=False)}
    assert resolve_blas("a", openers, put_in_front).name == "a"
    with pytest.raises(ConfigurationError, match=r"blas: b \(it is not installed\); choose auto, none, a, b or"):
        resolve_blas("b", openers, put_in_front)


def test_none_keeps_the_bundled_one() -> None:
    assert resolve_blas("none", {"a": opener("a")}, put_in_front) == BUNDLED


def test_an_unusable_path_is_named_by_its_file() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_blas("/nonexistent/folder/libfast.so", {}, put_in_front)
    assert caught.value.setting == "blas"
    assert str(caught.value).startswith("blas: libfast.so (it cannot be opened as a shared library)")
    assert "/nonexistent" not in str(caught.value)


def test_a_shim_that_mlx_does_not_use_is_not_claimed() -> None:
    hoped = BlasReport(name="X", shim=True)
    assert confirm_blas(hoped, counted=True, gigaflops=0.1) == BlasReport(name="X", shim=True, optimized=True)
    missed = confirm_blas(hoped, counted=False, gigaflops=2.0)
    assert (missed.shim, missed.optimized) == (False, False)
    assert missed.remedy


def test_a_fast_library_without_a_shim_counts_as_optimized() -> None:
    assert confirm_blas(BUNDLED, counted=False, gigaflops=70.0).remedy == ""
    assert confirm_blas(BUNDLED, counted=False, gigaflops=2.0).remedy == BUNDLED.remedy


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (BlasReport(name="X"), "X"),
        (BlasReport(name="X", threads=1), "X, 1 thread"),
        (BlasReport(name="X", threads=2, shim=True), "X, 2 threads, few-row shim"),
    ],
)
def test_the_report_reads_as_one_line(report: BlasReport, line: str) -> None:
    assert report.describe() == line


PREPARE = """
from engine.runtime.blas import prepare_blas
report = prepare_blas({wish!r}, thread_wish=None, usable_cores=4, shim_directory=cache)
answer = [report.name, report.shim, report.threads, report.remedy]
"""


def test_the_wheel_serves_through_the_shim(wheel_and_compiler: None, ask: Any) -> None:
    name, shim, threads, remedy = ask(PREPARE.format(wish=None))
    assert name.startswith("OpenBLAS 0.")
    assert (shim, threads, remedy) == (True, 1, ""), "OPENBLAS_NUM_THREADS is honoured"


def test_the_wheel_without_a_compiler_is_refused_by_name(wheel_and_compiler: None, ask: Any) -> None:
    answer = ask(
        "from engine.contracts.errors import ConfigurationError\n"
        "from engine.runtime.blas import prepare_blas\n"
        "try:\n"
        "    prepare_blas('scipy-openblas32', thread_wish=1, usable_cores=1, shim_directory=cache)\n"
        "except ConfigurationError as error:\n"
        "    answer = str(error)\n",
        PATH="/nonexistent",
    )
    assert answer.startswith("blas: scipy-openblas32 (its functions must be forwarded, and there is no C compiler)")


def test_a_second_call_tells_what_the_first_one_did(wheel_and_compiler: None, ask: Any) -> None:
    first = ask(PREPARE.format(wish=None))
    assert ask(PREPARE.format(wish=None) + PREPARE.format(wish="none")) == first


def test_it_says_when_mlx_came_first(ask: Any) -> None:
    name, shim, _, remedy = ask("import mlx.core\n" + PREPARE.format(wish=None))
    assert (name, shim) == (BUNDLED.name, False)
    assert "before anything else imports mlx" in remedy
