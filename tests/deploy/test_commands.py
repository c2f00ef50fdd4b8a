"""The commands of the deployment files, run as they stand: a server starts, its probes answer, its signal ends it.

Only what a test cannot have is replaced: the model by a tiny one, ports by free ones, folders of a system by a test's.
"""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine import tiny_model
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
START_SECONDS = 60
LIVENESS = ["python", "-m", "service.probe", "127.0.0.1:50051"]


@dataclass(frozen=True)
class Command:
    """How a server is started, asked and ended; `config` is what lies in /etc/mlx-stream/config.toml."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    probes: Sequence[Sequence[str]] = (LIVENESS,)
    signal: signal.Signals = signal.SIGTERM


def of_docker(stage: str) -> Command:
    """The image's: its entry point with the arguments that it has by default."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "docker/Dockerfile").read_text())
    base = text.partition(" AS base\n")[2].partition("\nFROM ")[0]
    lines = text.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0].splitlines()

    def listed(start: str) -> list[str]:
        (found,) = [line for line in lines if line.startswith(start)]
        return list(json.loads(found[found.index("[") :]))

    (variables,) = re.findall(r"^ENV (.*)$", base, re.M)
    (stop,) = re.findall(r"^STOPSIGNAL (\w+)$", base, re.M)
    return Command(
        words=[*listed("ENTRYPOINT "), *listed("CMD ")],
        environment=dict(word.split("=", 1) for word in shlex.split(variables)),
        probes=[listed("HEALTHCHECK ")],
        signal=signal.Signals[stop],
    )


def of_kubernetes() -> Command:
    """The pod's: the image's entry point with the pod's own arguments, and its probes, as a command each."""
    stateful: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes/statefulset.yaml").read_text())
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    probes = [container[name]["grpc"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes[0] == probes[1]
    image = of_docker("cpu")
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert shutil.which(stop[0])
    return Command(
        words=[*image.words[:2], *container["args"]],
        environment=image.environment,
        config=(DEPLOY / "kubernetes/config.toml").read_text(),
        probes=[[*LIVENESS[:3], f"127.0.0.1:{probe['port']}", probe.get("service", "")] for probe in probes[1:]],
    )


def of_systemd() -> Command:
    """The unit's, with a configuration of the least that a server needs."""
    text = (DEPLOY / "systemd/mlx-stream.service").read_text()
    (start,), (variables,) = re.findall(r"^ExecStart=(.*)$", text, re.M), re.findall(r"^Environment=(.*)$", text, re.M)
    return Command(
        words=shlex.split(start),
        environment=dict(word.split("=", 1) for word in shlex.split(variables)),
        config='model = "smollm2-135m"\nlisten = "127.0.0.1:50051"\n',
    )


def of_launchd() -> Command:
    """The job's."""
    job = plistlib.loads((DEPLOY / "launchd/org.mlx-stream.server.plist").read_bytes())
    return Command(words=job["ProgramArguments"])


COMMANDS = {
    "docker": lambda: of_docker("cpu"),
    "kubernetes": of_kubernetes,
    "systemd": of_systemd,
    "launchd": of_launchd,
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what a server keeps over its lives: kernels are compiled once."""
    folder = tmp_path_factory.mktemp("kept")
    tiny_model.write(folder / "tiny")
    return folder


class Host:
    """Where a command runs: what it finds under the names that the files use."""

    def __init__(self, kept: Path, folder: Path) -> None:
        self._folder = folder
        self._places = {
            "/etc/mlx-stream/config.toml": str(folder / "config.toml"),
            "/var/lib/mlx-stream": str(kept / "state"),
            "/var/cache/mlx-stream": str(kept / "cache"),
            "smollm2-135m": str(kept / "tiny"),
            "50051": str(free_port()),
            "9090": str(free_port()),
        }

    def here(self, text: str) -> str:
        for theirs, ours in self._places.items():
            text = text.replace(theirs, ours)
        return text

    def start(self, words: Sequence[str], environment: Mapping[str, str], config: str = "") -> subprocess.Popen[str]:
        (self._folder / "config.toml").write_text(self.here(config))
        program, *arguments = words
        programs = {"mlx-stream": [sys.executable, "-m", "service.cli"], "python": [sys.executable]}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLX_STREAM_")}
        return subprocess.Popen(
            [*programs[Path(program).name], *map(self.here, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")]),
                "MLX_STREAM_DEVICE": "cpu",
                **{name: self.here(value) for name, value in environment.items()},
            },
        )

    def status_of(self, words: Sequence[str]) -> int:
        process = self.start([word for word in words if word], {})
        process.communicate(timeout=START_SECONDS)
        return process.returncode


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_server_starts_answers_its_probes_and_ends_by_its_signal(name: str, kept: Path, tmp_path: Path) -> None:
    command, host = COMMANDS[name](), Host(kept, tmp_path)
    server = host.start(command.words, command.environment, command.config)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving tiny on "), server.communicate()[1]
        for probe in command.probes:
            assert host.status_of(probe) == 0, probe
        server.send_signal(command.signal)
        _, log = server.communicate(timeout=START_SECONDS)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0, log
    assert "Traceback" not in log
    if "json" in " ".join([*command.words, *command.environment.values()]):
        assert {json.loads(line)["level"] for line in log.splitlines()} <= {"info", "warning"}


def test_both_images_are_started_asked_and_ended_alike() -> None:
    assert of_docker("cuda") == of_docker("cpu")
