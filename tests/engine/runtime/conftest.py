"""A fresh interpreter per question: which BLAS a process uses is settled before it imports mlx, once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

Ask = Callable[..., Any]


@pytest.fixture
def wheel_and_compiler() -> None:
    """Skip where the shim over the PyPI wheel cannot be built: it is the default on Linux CPUs alone."""
    if sys.platform != "linux" or importlib.util.find_spec("scipy_openblas32") is None:
        pytest.skip("the scipy-openblas32 package is not installed")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")


@pytest.fixture
def compiler() -> str:
    """A C compiler; skips without one."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        pytest.skip("there is no C compiler")
    return found


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Run code in a new interpreter with one BLAS thread and return what it assigned to `answer`.

    The code sees `cache` (an empty folder), `Path` and `ask_settings` (a RuntimeSettings over that folder, CPU).
    """

    def run(code: str, *, cache: Path | None = None, **environment: str) -> Any:
        folder = cache or tmp_path / "cache"
        answer = tmp_path / "answer.json"
        prologue = (
            "import json\nfrom pathlib import Path\nfrom engine.runtime.settings import RuntimeSettings\n"
            f"cache = Path({str(folder)!r})\n"
            "def ask_settings(**choices):\n"
            "    return RuntimeSettings(**{'cache_directory': cache, 'device': 'cpu', **choices})\n"
        )
        epilogue = f"\nPath({str(answer)!r}).write_text(json.dumps(answer))\n"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **environment}
        done = subprocess.run(
            [sys.executable, "-c", prologue + code + epilogue],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(answer.read_text(encoding="utf-8"))

    return run
