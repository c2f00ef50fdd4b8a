"""The engine thread's first call: mlx comes up once everything under it is in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.runtime import prepare

ROOT = Path(prepare.__file__).parents[2]

PREPARE = """
from engine.runtime.prepare import prepare_runtime
runtime = prepare_runtime(ask_settings({choices}))
info = runtime.info
"""
PRODUCTS = """
import mlx.core as mx
import numpy as np
from engine.runtime.blas import count_products
generator = np.random.default_rng(1)
weights = generator.standard_normal((300, 64), np.float32)
before, worst = count_products(), 0.0
for rows in (1, 3, 4, 5, 40):
    x = generator.standard_normal((rows, 64), np.float32)
    for got, right in (
        (mx.array(x) @ mx.array(weights).T, x @ weights.T),
        (mx.array(x) @ mx.contiguous(mx.array(weights).T), x @ weights.T),
        (mx.array(weights) @ mx.array(x).T, weights @ x.T),
        (mx.addmm(mx.ones((300,)), mx.array(x), mx.array(weights).T), x @ weights.T + 1),
    ):
        worst = max(worst, float(np.abs(np.array(got) - right).max()))
products = count_products() - before
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is chosen on Linux CPUs alone")


def prepared(answer: str, *, choices: str = "", before: str = "", after: str = "") -> str:
    return before + PREPARE.format(choices=choices) + after + f"\nanswer = {answer}"


def test_importing_the_runtime_never_imports_mlx() -> None:
    code = "import sys, engine.runtime.prepare, engine.runtime.settings; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_a_cpu_computes_the_right_products_through_the_shim(wheel_and_compiler: None, ask: Any) -> None:
    answer = "[info.blas, info.blas_optimized, info.remedy, worst, products]"
    blas, optimized, remedy, worst, products = ask(prepared(answer, after=PRODUCTS))
    assert blas.startswith("OpenBLAS")
    assert blas.endswith("1 thread, few-row shim")
    assert (optimized, remedy) == (True, "")
    assert worst < 1e-4
    assert products == 20


@linux_only
def test_without_an_optimized_blas_it_works_all_the_same_and_names_the_remedy(ask: Any) -> None:
    answer = "[info.blas, info.blas_optimized, info.remedy, worst]"
    blas, optimized, remedy, worst = ask(prepared(answer, choices="blas='none'", after=PRODUCTS))
    assert worst < 1e-4
    assert blas == "bundled with mlx"
    assert optimized is (remedy == "")
    assert optimized or "libopenblas0-pthread" in remedy


def test_preparing_again_changes_nothing(ask: Any) -> None:
    again = "first = info\n" + PREPARE.format(choices="blas='none'")
    assert ask(prepared("[first.blas, first.device] == [info.blas, info.device]", after=again)) is True


def test_it_may_run_on_another_thread_than_the_first(ask: Any) -> None:
    before = "import threading\nfound = []\ndef work():\n"
    work = "".join(f"    {line}\n" for line in PREPARE.format(choices="").splitlines() if line)
    compute = "    import mlx.core as mx\n    found.append((mx.ones((2, 2)) @ mx.ones((2, 2))).sum().item())\n"
    run = "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\nanswer = found"
    assert ask(before + work + compute + run) == [8.0]


@linux_only
def test_compiled_kernels_are_kept_in_the_private_folder(compiler: str, ask: Any, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    compute = (
        "import mlx.core as mx, shutil\nf = mx.compile(lambda x: mx.exp(x) * x + 1)\nmx.eval(f(mx.ones(4)))\n"
        "kernels = [path.suffix for path in (cache / 'kernels').rglob('*') if path.is_file()]\n"
    )
    has_cxx, kernels = ask(prepared("[shutil.which('g++') is not None, kernels]", after=compute), TMPDIR=str(shared))
    assert (".so" in kernels) is has_cxx
    assert list(shared.iterdir()) == []


def test_the_device_and_versions_are_told(ask: Any) -> None:
    device, name, version = ask(prepared("[info.device, info.device_name, info.mlx_version]"))
    assert device == "cpu"
    assert name
    assert version.startswith("0.")


def test_an_impossible_device_is_refused_before_mlx_is_imported(ask: Any) -> None:
    impossible = "cuda" if sys.platform == "darwin" else "metal"
    code = (
        "import sys\nfrom engine.contracts.errors import ConfigurationError\n"
        "from engine.runtime.prepare import prepare_runtime\n"
        f"try:\n    prepare_runtime(ask_settings(device={impossible!r}))\n"
        "except ConfigurationError as error:\n    answer = [error.setting, 'mlx.core' in sys.modules]\n"
    )
    assert ask(code) == ["device", False]


def test_what_mlx_holds_is_told_and_a_cpu_has_no_memory_of_its_own(ask: Any) -> None:
    held = "import mlx.core as mx\nheld = mx.zeros((1000,))\nmx.eval(held)"
    answer = "[runtime.memory.active_bytes() >= held.nbytes, runtime.memory.limit_bytes]"
    assert ask(prepared(answer, after=held)) == [True, None]


def test_the_layout_follows_from_what_was_prepared(wheel_and_compiler: None, ask: Any) -> None:
    weights = (
        "from engine.runtime.policy import WeightsFacts\n"
        "layout = runtime.layout(WeightsFacts(parameters=1000, stored_dtype='float16', quantized=True))"
    )
    answer = "[layout.compute_dtype, layout.dequantize, layout.pretranspose_linear]"
    assert ask(prepared(answer, after=weights)) == ["float32", True, False]
    assert ask(prepared(answer, choices="blas='none'", after=weights)) == ["float32", True, True]
