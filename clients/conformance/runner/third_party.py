"""Tools that are not ours against the same server: grpcurl, grpc_health_probe and ghz, where they can be installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = {
    "grpcurl": "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3",
    "grpc_health_probe": "github.com/grpc-ecosystem/grpc-health-probe@v0.4.40",
    "ghz": "github.com/bojand/ghz/cmd/ghz@v0.120.0",
}
BINARIES = {"grpc_health_probe": "grpc-health-probe"}
INSTALL_SECONDS = 300
CALL_SECONDS = 60
SERVICE = "mlxstream.v1.GenerationService"


@dataclass(frozen=True, slots=True)
class ToolReport:
    """How one tool got on: `passed`, `failed` or `skipped`, and why."""

    tool: str
    outcome: str
    detail: str = ""


def install_tools(folder: Path) -> dict[str, Path | str]:
    """Install the tools below `folder` if they are not there; for each its binary, or why there is none."""
    installed: dict[str, Path | str] = {}
    for tool in MODULES:
        try:
            installed[tool] = _installed(tool, folder)
        except (OSError, subprocess.SubprocessError) as error:
            installed[tool] = f"cannot be installed: {_last_line(error)}"
    return installed


def check_tools(installed: Mapping[str, Path | str], target: str) -> list[ToolReport]:
    """Let each tool talk to the server at `target`."""
    checks: dict[str, Callable[[str, str], str]] = {
        "grpcurl": _grpcurl,
        "grpc_health_probe": _health_probe,
        "ghz": _ghz,
    }
    return [_report(tool, installed[tool], target, check) for tool, check in checks.items()]


def _report(tool: str, binary: Path | str, target: str, check: Callable[[str, str], str]) -> ToolReport:
    if isinstance(binary, str):
        return ToolReport(tool, "skipped", binary)
    try:
        problem = check(str(binary), target)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        problem = _last_line(error)
    return ToolReport(tool, "failed" if problem else "passed", problem)


def _installed(tool: str, folder: Path) -> Path:
    binary = folder / BINARIES.get(tool, tool)
    if binary.exists():
        return binary
    if shutil.which("go") is None:
        raise FileNotFoundError("go is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-trimpath -p=1"}
    subprocess.run(
        ["go", "install", MODULES[tool]],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        cwd=folder,
    )
    return binary


def _grpcurl(binary: str, target: str) -> str:
    """Services by reflection, then a stream: the grammar as a stranger's reader sees it."""
    listed = _run(binary, "-plaintext", target, "list").split()
    if SERVICE not in listed:
        return f"reflection lists {listed}"
    request = json.dumps({"text": {"text": "[[count]]"}, "options": {"max_tokens": 2}})
    told = _documents(_run(binary, "-plaintext", "-d", request, target, f"{SERVICE}/Generate"))
    kinds = [next(key for key in event if key != "sequence") for event in told]
    text = "".join(event["chunk"].get("text", "") for event in told if "chunk" in event)
    if kinds[0] != "started" or kinds[-1] != "finished" or text != "one two ":
        return f"the stream was {kinds} with the text {text!r}"
    refused = subprocess.run(
        [binary, "-plaintext", "-d", '{"text": {"text": "x"}, "options": {"temperature": -1}}', target,
         f"{SERVICE}/Generate"],
        check=False, capture_output=True, text=True, timeout=CALL_SECONDS,
    )  # fmt: skip
    return "" if "options.temperature" in refused.stderr else f"a bad field is told as {refused.stderr!r}"


def _health_probe(binary: str, target: str) -> str:
    told = subprocess.run(
        [binary, f"-addr={target}", f"-service={SERVICE}"],
        check=False, capture_output=True, text=True, timeout=CALL_SECONDS,
    )  # fmt: skip
    return "" if told.returncode == 0 and "SERVING" in told.stderr else told.stderr.strip()


def _ghz(binary: str, target: str) -> str:
    """Two hundred streams, twenty at a time, none of which may fail."""
    request = json.dumps({"text": {"text": "[[count]]"}})
    report = json.loads(
        _run(
            binary,
            "--insecure",
            "--call",
            f"{SERVICE}/Generate",
            "-d",
            request,
            "-n",
            "200",
            "-c",
            "20",
            "-O",
            "json",
            target,
        )
    )
    counts = report["statusCodeDistribution"]
    return "" if counts == {"OK": 200} else f"statuses {counts}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=CALL_SECONDS).stdout


def _documents(text: str) -> list[dict[str, Any]]:
    decoder, documents, rest = json.JSONDecoder(), [], text.lstrip()
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].lstrip()
    return documents


def _last_line(error: Exception) -> str:
    told = getattr(error, "stderr", None) or str(error)
    return str(told).strip().splitlines()[-1][:200] if str(told).strip() else type(error).__name__
