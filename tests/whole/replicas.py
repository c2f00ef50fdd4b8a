"""Servers as processes, each on a port that it keeps over restarts, and a channel that balances over them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "mlxstream.v1.GenerationService"},
    "methodConfig": [
        {
            "name": [{"service": "mlxstream.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


class Replica:
    """One `mlx-stream serve` after the other, at one address."""

    def __init__(self, model: Path, state_dir: Path, *flags: str) -> None:
        """Start it; `ready` waits for it."""
        self.address = f"127.0.0.1:{free_port()}"
        self._arguments = [
            "--model", str(model), "--listen", self.address, "--state-dir", str(state_dir), "--device", "cpu",
            "--log-level", "warning", *flags,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start a process, the one before having ended."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_STREAM_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ready(self) -> None:
        """Wait until it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line + self.process.communicate()[1]

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.communicate()

    def ended(self, seconds: float = 60) -> tuple[int, str]:
        """Its exit status and its last words."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors

    def close(self) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            self.kill()


def balanced(replicas: Sequence[Replica]) -> grpc.aio.Channel:
    """A channel over all replicas: calls go round, and only to those whose health is good."""
    target = "ipv4:" + ",".join(replica.address for replica in replicas)
    options = (
        ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_http_proxy", 0),
    )
    return grpc.aio.insecure_channel(target, options=options)
