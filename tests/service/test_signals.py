"""A request to stop that comes before there is a server ends the process with a line and without a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")])}


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_modules_are_imported_is_a_clean_end(number: signal.Signals) -> None:
    process = start(
        "import time; from service.signals import leave_on_signals\n"
        "leave_on_signals(); print(flush=True); time.sleep(60)"
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "mlx-stream serve: stopped before it was ready\n")


def test_nothing_heavy_is_imported_before_signals_are_answered() -> None:
    process = start("import sys, service.cli.serve; print(*sys.modules)")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "service.signals" in out.split()
    assert set(out.split()) & {"grpc", "pydantic", "numpy", "google.protobuf", "engine", "asyncio"} == set()
