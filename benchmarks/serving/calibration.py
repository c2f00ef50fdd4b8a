"""What the machine was and how fast it ran: a fixed loop is timed beside every measurement, since hosts drift."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LOOP_ITERATIONS = 1_000_000
PACKAGES = ("mlx", "grpcio", "protobuf", "scipy-openblas32", "tokenizers")


def loop_rate() -> float:
    """Million iterations a second of an empty Python loop: the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(LOOP_ITERATIONS):
            pass
        best = min(best, time.perf_counter() - began)
    return LOOP_ITERATIONS / best / 1e6


def busy_seconds() -> float | None:
    """Processor time that the whole machine has spent so far; None where the system does not say."""
    if sys.platform != "linux":
        return None
    user, nice, system, _, _, interrupts, soft_interrupts = _processor_times()
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def _processor_times() -> list[int]:
    first_line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    return [int(field) for field in first_line.split()[1:8]]


def machine_facts(repository: Path) -> dict[str, Any]:
    """Processor, memory, system, versions and revision."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "revision": _git(repository, "rev-parse", "--short=12", "HEAD"),
        "changed_files": len(
            _git(repository, "status", "--porcelain", "--", "engine", "service", "clients").splitlines()
        ),
    }


def package_version(name: str) -> str | None:
    """Version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _git(repository: Path, *arguments: str) -> str:
    return _output(["git", "-C", str(repository), *arguments])


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
