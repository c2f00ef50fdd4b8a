"""What the tools of each kind of deployment file say of ours; each is skipped where its tool is not installed.

`make check` installs hadolint, the schemas of Kubernetes and Envoy; systemd and Prometheus bring their own judges.
"""

from __future__ import annotations

import json
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.service.test_proxies import SEARCH_PATH

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# The oldest release whose probes speak gRPC for good.
OLDEST_KUBERNETES = "1.27"


def tool(name: str) -> str:
    """Where `name` is installed."""
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def said(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say_of_the_image() -> None:
    assert said(tool("hadolint"), str(DEPLOY / "docker/Dockerfile")) == (0, "")


def test_hadolint_would_object(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text((DEPLOY / "docker/Dockerfile").read_text() + "RUN apt-get install curl\n")
    status, told = said(tool("hadolint"), str(bad))
    assert status == 1
    assert "DL3008" in told


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, "latest"])
def test_every_manifest_is_one_by_the_schemas_of_kubernetes(version: str) -> None:
    judge = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wanted = judge.latest_version() if version == "latest" else version
    files = [file for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if file.name != "kustomization.yaml"]
    assert len(files) >= 4
    for file in files:
        judge.validate(yaml.safe_load(file.read_text()), wanted, strict=True)


@pytest.mark.parametrize("harm", [("podManagementPolicy", "podManagement"), ("replicas: 2", "replicas: two")])
def test_the_schemas_of_kubernetes_would_object(harm: tuple[str, str]) -> None:
    judge = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    text = (DEPLOY / "kubernetes/statefulset.yaml").read_text()
    assert harm[0] in text
    with pytest.raises(judge.ValidationError):
        judge.validate(yaml.safe_load(text.replace(*harm)), OLDEST_KUBERNETES, strict=True)


def test_envoy_takes_its_configuration() -> None:
    status, told = said(tool("envoy"), "--mode", "validate", "-l", "warning", "-c", str(DEPLOY / "envoy/envoy.yaml"))
    assert (status, "OK" in told) == (0, True), told
    assert "deprecated" not in told.lower()


def unit(tmp_path: Path, *harm: str) -> str:
    """The unit with a program that exists, and perhaps with a fault."""
    text = (DEPLOY / "systemd/mlx-stream.service").read_text()
    program = "/opt/mlx-stream/.venv/bin/mlx-stream"
    assert program in text
    file = tmp_path / "mlx-stream.service"
    file.write_text(text.replace(program, sys.executable).replace(*(harm or ("", ""))))
    return str(file)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    status, told = said(tool("systemd-analyze"), "verify", "--man=no", unit(tmp_path))
    assert (status, "mlx-stream.service" in told) == (0, False), told


@pytest.mark.parametrize("harm", [("TimeoutStopSec=30", "TimeoutStopSec=soon"), ("DynamicUser", "DynamicUsers")])
def test_systemd_would_object(tmp_path: Path, harm: tuple[str, str]) -> None:
    _, told = said(tool("systemd-analyze"), "verify", "--man=no", unit(tmp_path, *harm))
    assert "mlx-stream.service" in told


# Source: launchd.plist(5). Keys that we use, and of which kind their values are.
LAUNCHD = {
    "Label": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "StandardErrorPath": str,
}


def test_launchd_knows_every_key_of_the_job() -> None:
    job = plistlib.loads((DEPLOY / "launchd/org.mlx-stream.server.plist").read_bytes())
    assert {key: type(value) for key, value in job.items()} == LAUNCHD
    assert all(isinstance(argument, str) for argument in job["ProgramArguments"])
    assert job["KeepAlive"].keys() <= {"SuccessfulExit", "Crashed", "PathState", "OtherJobEnabled"}
    assert job["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    for limits in (job["SoftResourceLimits"], job["HardResourceLimits"]):
        assert limits.keys() <= {"Core", "CPU", "Data", "FileSize", "MemoryLock", "NumberOfFiles", "NumberOfProcesses"}
        assert all(type(value) is int for value in limits.values())


def test_plutil_takes_the_job() -> None:
    status, told = said(tool("plutil"), "-lint", str(DEPLOY / "launchd/org.mlx-stream.server.plist"))
    assert status == 0, told


def test_promtool_takes_the_alerts_and_the_questions_of_the_dashboard(tmp_path: Path) -> None:
    promtool, rules = tool("promtool"), tmp_path / "dashboard.yaml"
    asked = [{"record": f"asked:{place}", "expr": each_interval(text)} for place, text in enumerate(expressions())]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": asked}]}))
    for file in (DEPLOY / "prometheus/alerts.yaml", rules):
        status, told = said(promtool, "check", "rules", str(file))
        assert status == 0, told


def test_promtool_would_object(tmp_path: Path) -> None:
    bad = tmp_path / "alerts.yaml"
    bad.write_text((DEPLOY / "prometheus/alerts.yaml").read_text().replace("mlx_stream_ready == 0", "sum by ready"))
    assert said(tool("promtool"), "check", "rules", str(bad))[0] == 1


def expressions() -> list[str]:
    """What the dashboard asks."""
    panels = json.loads((DEPLOY / "grafana/mlx-stream.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def each_interval(expression: str) -> str:
    """As Grafana sends it: with its own variable filled in."""
    return expression.replace("$__rate_interval", "5m")
