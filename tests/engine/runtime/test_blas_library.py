"""Opening BLAS libraries: what can serve, what cannot, and what each says of itself."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from engine.runtime.blas_library import BlasUnusableError, open_library, open_mkl, open_wheel

THREADED = """
static int threads = 8;
void cblas_sgemm(void) {}
int openblas_get_num_threads(void) { return threads; }
void openblas_set_num_threads(int wish) { threads = wish; }
char *openblas_get_config(void) { return "OpenBLAS 9.9 DYNAMIC_ARCH"; }
char *openblas_get_corename(void) { return "Test"; }
"""
WIDE = 'void cblas_sgemm(void) {}\nchar *openblas_get_config(void) { return "OpenBLAS 9.9 USE64BITINT"; }'
PREFIXED = "void scipy_cblas_sgemm(void) {}\nvoid scipy_cblas_sgemv(void) {}"


def build(compiler: str, folder: Path, source: str, name: str = "libtest.so") -> str:
    path = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source.encode(), check=True)
    return str(path)


def test_threads_stay_within_the_usable_cores(compiler: str, tmp_path: Path) -> None:
    library = open_library(build(compiler, tmp_path, THREADED))
    assert library.threads() == 8
    assert library.set_threads(None, usable_cores=3) == 3
    assert library.set_threads(None, usable_cores=6) == 3, "fewer threads than cores were chosen, and stay"


def test_wished_threads_are_used_as_wished(compiler: str, tmp_path: Path) -> None:
    assert open_library(build(compiler, tmp_path, THREADED)).set_threads(5, usable_cores=2) == 5


def test_openblas_tells_its_version_and_kernels(compiler: str, tmp_path: Path) -> None:
    assert open_library(build(compiler, tmp_path, THREADED)).describe() == "OpenBLAS 9.9 (Test kernels)"


def test_an_unknown_library_is_called_by_its_file_and_keeps_its_threads(compiler: str, tmp_path: Path) -> None:
    library = open_library(build(compiler, tmp_path, "void cblas_sgemm(void) {}"))
    assert (library.describe(), library.set_threads(4, usable_cores=4), library.threads()) == ("libtest.so", 0, 0)


def test_prefixed_functions_are_found_under_their_plain_names(compiler: str, tmp_path: Path) -> None:
    library = open_library(build(compiler, tmp_path, PREFIXED))
    assert library.prefix == "scipy_"
    assert library.address("cblas_sgemv").value
    with pytest.raises(BlasUnusableError, match="no cblas_dgemm"):
        library.address("cblas_dgemm")


def test_wide_integers_are_refused(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(BlasUnusableError, match="64-bit integers"):
        open_library(build(compiler, tmp_path, WIDE))


def test_a_library_without_products_is_refused(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(BlasUnusableError, match="no cblas_sgemm"):
        open_library(build(compiler, tmp_path, "int nothing;"))


@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_what_is_no_library_is_refused_without_its_path(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "libblas.so"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BlasUnusableError) as caught:
        open_library(str(file))
    assert str(tmp_path) not in str(caught.value)


def test_the_wheel_is_opened_for_ourselves_alone(wheel_and_compiler: None) -> None:
    library = open_wheel()
    assert library.prefix == "scipy_"
    assert library.describe().startswith("OpenBLAS 0.")
    with pytest.raises(AttributeError):
        _ = ctypes.CDLL(None).scipy_cblas_sgemm


def test_a_package_that_is_not_installed_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BlasUnusableError, match="not installed"):
        open_wheel()
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(BlasUnusableError, match="not installed"):
        open_mkl()
