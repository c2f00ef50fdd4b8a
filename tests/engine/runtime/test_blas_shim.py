"""The forwarding shim: the same products as numpy for every call that mlx makes, compiled once and safely."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runtime import blas_shim
from engine.runtime.blas_library import FEW_ROWS, BlasLibrary, open_wheel
from engine.runtime.blas_shim import FORWARDED, LoadedShim, load_shim
from engine.runtime.compiled import CannotCompileError, compile_library

ROW_MAJOR, COLUMN_MAJOR, PLAIN, TRANSPOSED = 101, 102, 111, 112
SOURCE = b"\n".join(Path(blas_shim.__file__).with_name(name).read_bytes() for name in blas_shim.SOURCES)


@dataclass(frozen=True)
class Bench:
    """A shim of our own, opened for this test alone, over the wheel's OpenBLAS."""

    shim: LoadedShim
    library: ctypes.CDLL
    target: BlasLibrary


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    try:
        compile_library(SOURCE, path)
    except CannotCompileError as error:
        pytest.skip(str(error))
    return path


@pytest.fixture
def bench(wheel_and_compiler: None, compiled: Path) -> Bench:
    library = ctypes.CDLL(str(compiled))
    shim, target = LoadedShim(library), open_wheel()
    shim.bind([target.address(name) for name in FORWARDED])
    shim.tune(few_rows=FEW_ROWS, threads=1, label="under test")
    return Bench(shim=shim, library=library, target=target)


def pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def sgemm(
    bench: Bench,
    left: np.ndarray[Any, Any],
    right: np.ndarray[Any, Any],
    *,
    transposes: tuple[int, int] = (PLAIN, PLAIN),
    beta: float = 0.0,
    alpha: float = 1.0,
    out: np.ndarray[Any, Any],
) -> None:
    """out = alpha * op(left) @ op(right) + beta * out; leading dimensions come from the arrays' own strides."""
    rows, columns = out.shape
    inner = left.shape[1] if transposes[0] == PLAIN else left.shape[0]
    lda, ldb, ldc = (array.strides[0] // 4 for array in (left, right, out))
    bench.library.cblas_sgemm(
        *(ROW_MAJOR, *transposes, rows, columns, inner, ctypes.c_float(alpha), pointer(left), lda),
        *(pointer(right), ldb, ctypes.c_float(beta), pointer(out), ldc),
    )


def padded(generator: np.random.Generator, rows: int, columns: int, padding: int) -> np.ndarray[Any, Any]:
    """A view whose rows lie `padding` floats apart in memory."""
    return generator.standard_normal((rows, columns + padding), dtype=np.float32)[:, :columns]


@pytest.mark.parametrize("transposes", [(a, b) for a in (PLAIN, TRANSPOSED) for b in (PLAIN, TRANSPOSED)])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, FEW_ROWS, FEW_ROWS + 1, 11, 16, 17])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (1, 9), (7, 1), (33, 20), (1500, 64)])
def test_products_equal_numpy(
    bench: Bench, transposes: tuple[int, int], padding: int, rows: int, columns: int, inner: int
) -> None:
    generator = np.random.default_rng(7)
    left_shape = (rows, inner) if transposes[0] == PLAIN else (inner, rows)
    right_shape = (inner, columns) if transposes[1] == PLAIN else (columns, inner)
    left, right = padded(generator, *left_shape, padding), padded(generator, *right_shape, padding)
    out = padded(generator, rows, columns, padding)
    before = out.copy()

    sgemm(bench, left, right, transposes=transposes, alpha=0.5, beta=2.0, out=out)

    plain_left = left if transposes[0] == PLAIN else left.T
    plain_right = right if transposes[1] == PLAIN else right.T
    np.testing.assert_allclose(out, 0.5 * plain_left @ plain_right + 2.0 * before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_fresh_memory_full_of_nan_does_not_reach_the_result(bench: Bench, rows: int) -> None:
    out = np.full((rows, 50), np.nan, dtype=np.float32)
    sgemm(bench, np.ones((rows, 8), np.float32), np.ones((50, 8), np.float32), transposes=(PLAIN, TRANSPOSED), out=out)
    assert (out == 8).all()


def test_padding_between_rows_is_left_alone(bench: Bench) -> None:
    memory = np.full((FEW_ROWS, 60), 7, dtype=np.float32)
    left, right = np.ones((FEW_ROWS, 8), np.float32), np.ones((50, 8), np.float32)
    sgemm(bench, left, right, transposes=(PLAIN, TRANSPOSED), out=memory[:, :50])
    assert (memory[:, :50] == 8).all()
    assert (memory[:, 50:] == 7).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_an_empty_inner_dimension_scales_the_result_alone(bench: Bench, rows: int) -> None:
    out = np.full((rows, 5), 3, dtype=np.float32)
    nothing = np.ones((rows, 1), np.float32)
    bench.library.cblas_sgemm(
        *(ROW_MAJOR, PLAIN, PLAIN, rows, 5, 0, ctypes.c_float(1), pointer(nothing), 1),
        *(pointer(np.ones((1, 5), np.float32)), 5, ctypes.c_float(2), pointer(out), 5),
    )
    assert (out == 6).all()


def test_column_major_calls_are_forwarded_as_they_are(bench: Bench) -> None:
    generator = np.random.default_rng(3)
    left, right = generator.standard_normal((1, 6), np.float32), generator.standard_normal((6, 5), np.float32)
    out = np.zeros((1, 5), np.float32)
    bench.library.cblas_sgemm(
        *(COLUMN_MAJOR, PLAIN, PLAIN, 1, 5, 6, ctypes.c_float(1), pointer(left), 1),
        *(pointer(np.asfortranarray(right)), 6, ctypes.c_float(0), pointer(out), 1),
    )
    np.testing.assert_allclose(out, left @ right, rtol=1e-5)


def test_a_row_has_the_same_bits_beside_up_to_the_few_rows_on_any_number_of_threads(bench: Bench) -> None:
    few, generator = bench.shim.few_rows, np.random.default_rng(11)
    assert few >= FEW_ROWS
    rows, weights = (
        generator.standard_normal((few, 301), np.float32),
        generator.standard_normal((2501, 301), np.float32),
    )
    alone = np.empty((few, 2501), np.float32)
    for index in range(few):
        sgemm(bench, rows[index : index + 1], weights, transposes=(PLAIN, TRANSPOSED), out=alone[index : index + 1])
    for count in range(2, few + 1):
        bench.shim.tune(few_rows=FEW_ROWS, threads=1 + count % 3, label="under test")
        together = np.empty((count, 2501), np.float32)
        sgemm(bench, rows[:count], weights, transposes=(PLAIN, TRANSPOSED), out=together)
        assert together.tobytes() == alone[:count].tobytes()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("transpose", [PLAIN, TRANSPOSED])
@pytest.mark.parametrize("rows", [5, 40])
def test_products_of_several_threads_equal_numpy(bench: Bench, threads: int, transpose: int, rows: int) -> None:
    bench.shim.tune(few_rows=FEW_ROWS, threads=threads, label="under test")
    generator = np.random.default_rng(13)
    left, weights = padded(generator, rows, 300, 3), padded(generator, 1001, 300, 5)
    right = weights if transpose == TRANSPOSED else padded(generator, 300, 1001, 5)
    wanted = left @ (right.T if transpose == TRANSPOSED else right)
    for _ in range(20):
        out = np.full((rows, 1001), np.nan, np.float32)
        sgemm(bench, left, right, transposes=(PLAIN, transpose), out=out)
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-3)


def test_products_of_several_callers_do_not_mix(bench: Bench) -> None:
    bench.shim.tune(few_rows=FEW_ROWS, threads=2, label="under test")
    generator = np.random.default_rng(17)
    weights = generator.standard_normal((1000, 300), np.float32)

    def call(rows: int) -> bool:
        left, same = generator.standard_normal((rows, 300), np.float32), True
        wanted = left @ weights.T
        for _ in range(30):
            out = np.full((rows, 1000), np.nan, np.float32)
            sgemm(bench, left, weights, transposes=(PLAIN, TRANSPOSED), out=out)
            same &= np.allclose(out, wanted, rtol=1e-4, atol=1e-3)
        return same

    with ThreadPoolExecutor(3) as callers:
        assert list(callers.map(call, [1, 9, 30])) == [True] * 3


def test_without_few_rows_every_product_is_passed_on_as_it_is(bench: Bench) -> None:
    bench.shim.tune(few_rows=0, threads=2, label="under test")
    generator = np.random.default_rng(19)
    left, weights = generator.standard_normal((1, 300), np.float32), generator.standard_normal((1000, 300), np.float32)
    ours, theirs = np.empty((1, 1000), np.float32), np.empty((1, 1000), np.float32)
    sgemm(bench, left, weights, transposes=(PLAIN, TRANSPOSED), out=ours)
    bench.target.function("cblas_sgemm")(
        *(ROW_MAJOR, PLAIN, TRANSPOSED, 1, 1000, 300, ctypes.c_float(1), pointer(left), 300),
        *(pointer(weights), 300, ctypes.c_float(0), pointer(theirs), 1000),
    )
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "real"), [("cblas_dgemm", np.float64, True), ("cblas_cgemm", np.complex64, False)]
)
def test_other_dtypes_are_forwarded(bench: Bench, name: str, dtype: type, real: bool) -> None:
    generator = np.random.default_rng(5)
    left, right = (generator.standard_normal(shape).astype(dtype) for shape in ((1, 6), (6, 4)))
    out = np.zeros((1, 4), dtype)
    one, zero = np.ones(1, dtype), np.zeros(1, dtype)
    scales = (ctypes.c_double(1), ctypes.c_double(0)) if real else (pointer(one), pointer(zero))
    getattr(bench.library, name)(
        *(ROW_MAJOR, PLAIN, PLAIN, 1, 4, 6, scales[0], pointer(left), 6, pointer(right), 4, scales[1], pointer(out), 4)
    )
    np.testing.assert_allclose(out, left @ right, rtol=1e-5)


def test_it_counts_products_and_remembers_what_is_behind_it(bench: Bench) -> None:
    before = bench.shim.products()
    one = np.ones((1, 1), np.float32)
    sgemm(bench, one, one, out=one.copy())
    assert bench.shim.products() == before + 1
    assert (bench.shim.label, bench.shim.threads) == ("under test", 1)


RACE = """
import sys, time
from pathlib import Path
from engine.runtime.blas_shim import load_shim
while time.time() < float(sys.argv[2]):
    pass
shim = load_shim(Path(sys.argv[1]))
shim.tune(few_rows=1, threads=1, label="raced")
print(shim.label)
"""


def test_two_processes_may_compile_at_once(compiler: str, tmp_path: Path) -> None:
    start = str(time.time() + 0.5)
    command = [sys.executable, "-c", RACE, str(tmp_path / "blas"), start]
    root = Path(blas_shim.__file__).parents[2]
    racers = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [racer.communicate(timeout=60)[0].strip() for racer in racers] == ["raced", "raced"]
    assert [path.suffix for path in (tmp_path / "blas").iterdir()] == [".so"]
    assert (tmp_path / "blas").stat().st_mode & 0o777 == 0o700


KEPT = """
from engine.runtime.blas_shim import load_shim
shim = load_shim(cache)
shim.tune(few_rows=1, threads=1, label="kept")
answer = [shim.label, [(path.name, path.stat().st_ino) for path in cache.iterdir()]]
"""


def test_the_compiled_file_is_kept_and_needs_no_compiler_again(compiler: str, ask: Any) -> None:
    first = ask(KEPT)
    assert first[0] == "kept"
    assert len(first[1]) == 1
    assert ask(KEPT, PATH="/nonexistent") == first


def test_a_damaged_kept_file_is_made_anew(compiler: str, ask: Any, tmp_path: Path) -> None:
    ((name, _),) = ask(KEPT)[1]
    kept = tmp_path / "cache" / name
    kept.unlink()
    kept.write_bytes(b"\x7fELF cut short")
    assert ask(KEPT)[0] == "kept"
    assert kept.stat().st_size > 1000


def test_a_folder_that_cannot_be_made_costs_the_keeping_alone(compiler: str, ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    answer = ask(
        "from engine.runtime.blas_shim import load_shim\n"
        "shim = load_shim(cache / 'blas')\nshim.tune(few_rows=1, threads=1, label='unkept')\nanswer = shim.label",
        cache=tmp_path / "file",
    )
    assert answer == "unkept"


def test_no_compiler_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompileError, match="no C compiler"):
        load_shim(tmp_path / "blas")
    assert list((tmp_path / "blas").iterdir()) == []


def test_a_compiler_that_fails_is_quoted(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(CannotCompileError, match=r"C compiler failed: .*error"):
        compile_library(b"int main(void) { return }", tmp_path / "shim.so")
    assert list(tmp_path.iterdir()) == []
