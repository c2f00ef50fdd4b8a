"""What libraries are told before they are imported, and what a start does not import at all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.libraries import (
    SERVING_OBJECTS,
    STARTING_OBJECTS,
    collect_seldom,
    collect_soon,
    let_blas_threads_sleep,
    look_for_no_plugins,
    silence_grpc_core,
)

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")])}
VARIABLES = {"GRPC_VERBOSITY": "NONE", "OPENBLAS_THREAD_TIMEOUT": "4", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
TELLING = (silence_grpc_core, let_blas_threads_sleep, look_for_no_plugins)

# Each is imported where it is asked for: by --channelz, --metrics-listen, --otlp-endpoint, a client, the engine thread.
SELDOM = ("grpc_channelz", "prometheus_client", "opentelemetry", "mlxstream.client", "mlx.core")


def test_libraries_hear_what_we_want_unless_the_operator_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "as set")
    for tell in TELLING:
        tell()
    assert {os.environ[name] for name in VARIABLES} == {"as set"}
    for name in VARIABLES:
        monkeypatch.delenv(name)
    for tell in TELLING:
        tell()
    assert {name: os.environ[name] for name in VARIABLES} == VARIABLES


def test_garbage_is_looked_for_seldom_at_the_start_and_often_afterwards_but_not_in_what_was_there() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] == STARTING_OBJECTS
        collect_soon()
        assert gc.get_threshold()[0] == SERVING_OBJECTS
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_weights_can_be_read_before_grpc_is_there_and_a_start_imports_nothing_that_is_seldom_used() -> None:
    code = (
        "import sys, service.lifecycle\n"
        "print('grpc' in sys.modules)\n"
        "import service.serving\n"
        f"print(*[name for name in {SELDOM!r} if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=ENVIRONMENT)
    assert said.stdout.splitlines() == ["False", ""]
