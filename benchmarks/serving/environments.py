"""What the benchmark installs and writes for itself, all of it under `build/benchmarks`: the peers and the weights.

Peers never become dependencies of the product; they get the product's own versions of mlx and OpenBLAS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.serving.calibration import package_version

REPOSITORY: Final = Path(__file__).resolve().parents[2]
MLX_LM: Final = "mlx-lm==0.32.2"
SMG_SERVICER: Final = "smg-grpc-servicer[mlx]==0.14.1"
SMG_PROTO: Final = "smg-grpc-proto==0.4.28"
INSTALL_SECONDS = 900
EXPORT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The benchmark's folder and what lies in it."""

    folder: Path

    @property
    def model(self) -> Path:
        """The demo model in float32, as a Hugging Face folder."""
        return self.folder / "model"

    @property
    def state(self) -> Path:
        """Compiled kernels and the BLAS shim, shared by all contestants."""
        return self.folder / "state"

    @property
    def bytecode(self) -> Path:
        """Compiled modules of all contestants: where Python may write none, each start would compile ours anew."""
        return self.folder / "bytecode"

    @property
    def logs(self) -> Path:
        """Logs of the children."""
        return self.folder / "logs"

    @property
    def mlx_lm(self) -> Path:
        """Interpreter with mlx-lm."""
        return self.folder / "mlx-lm" / "bin" / "python"

    @property
    def smg(self) -> Path:
        """Interpreter with the smg MLX servicer, which wants an older mlx-lm."""
        return self.folder / "smg" / "bin" / "python"

    def prepare(self, model: str) -> None:
        """Install and export what is missing."""
        self.state.mkdir(parents=True, exist_ok=True)
        blas = [f"scipy-openblas32=={version}"] if (version := package_version("scipy-openblas32")) else []
        mlx = f"mlx[cpu]=={package_version('mlx')}" if sys.platform == "linux" else f"mlx=={package_version('mlx')}"
        self._environment("mlx-lm", MLX_LM, mlx, *blas)
        self._environment("smg", SMG_SERVICER, SMG_PROTO, mlx, *blas)
        self._install_beside("smg-proto", SMG_PROTO)
        sys.path.append(str(self.folder / "smg-proto"))
        if not self.model.exists():
            arguments = [model, str(self.model), str(self.state)]
            run([sys.executable, "-m", "benchmarks.serving.export", *arguments], EXPORT_SECONDS)

    def _environment(self, name: str, *packages: str) -> None:
        folder = self.folder / name
        if self._is_done(name, packages):
            return
        run([sys.executable, "-m", "venv", "--clear", str(folder)], INSTALL_SECONDS)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, *packages], INSTALL_SECONDS)
        self._mark_done(name, packages)

    def _install_beside(self, name: str, package: str) -> None:
        """The client's half of a peer, in a folder that is searched last: the product's packages stay in front."""
        if self._is_done(name, (package,)):
            return
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--upgrade", "--target", str(self.folder / name), package], INSTALL_SECONDS)
        self._mark_done(name, (package,))

    def _is_done(self, name: str, packages: tuple[str, ...]) -> bool:
        stamp = self.folder / f"{name}.installed"
        return stamp.exists() and stamp.read_text(encoding="utf-8") == "\n".join(packages)

    def _mark_done(self, name: str, packages: tuple[str, ...]) -> None:
        (self.folder / f"{name}.installed").write_text("\n".join(packages), encoding="utf-8")


def run(command: list[str], limit_seconds: float) -> None:
    """Run a step of the preparation from the repository's root; its output passes through."""
    subprocess.run(command, check=True, timeout=limit_seconds, cwd=REPOSITORY, env=environment_with_repository())


def environment_with_repository() -> dict[str, str]:
    """The variables under which children find this repository's packages, whatever interpreter they run on."""
    return {**os.environ, "PYTHONPATH": python_path()}


def python_path() -> str:
    """Where our packages lie."""
    return f"{REPOSITORY}:{REPOSITORY / 'clients/python/src'}"
