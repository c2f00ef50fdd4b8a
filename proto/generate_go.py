"""Generates the Go code of the schema into the Go client, or checks that the committed code is fresh.

The plugins are pinned here and installed by `go install` below `build/tools` when they are not there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0",
}
ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "mlxstream/v1"
MODULE = "github.com/mlx-stream/mlx-stream/clients/go"
OUTPUT = ROOT / "clients/go/v1"
TOOLS = ROOT / "build/tools" / "go-plugins"


def main() -> int:
    """Generate, or with `--check` report what is stale. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the committed code is stale")
    check = parser.parse_args().check
    install_plugins()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "v1").glob("*.go")}
    committed = {path.name: path.read_bytes() for path in OUTPUT.glob("*.go")}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if check:
        if stale:
            sys.stderr.write(f"stale generated code: {', '.join(stale)}; run `python proto/generate_go.py`\n")
        return 1 if stale else 0
    for name in stale:
        if name in fresh:
            (OUTPUT / name).write_bytes(fresh[name])
        else:
            (OUTPUT / name).unlink()
    return 0


def install_plugins() -> None:
    """Install the plugins whose versions are not there yet."""
    for name, module in PLUGINS.items():
        folder = plugin_folder(module)
        if not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            go = shutil.which("go") or "go"
            subprocess.run([go, "install", module], env={**os.environ, "GOBIN": str(folder)}, check=True)


def plugin_folder(module: str) -> Path:
    """Where one version of a plugin lives."""
    return TOOLS / module.rpartition("@")[2]


def generate(output: Path) -> None:
    """Write the package `v1` below `output`."""
    sources = sorted(f"{SCHEMA}/{path.name}" for path in (ROOT / "proto" / SCHEMA).glob("*.proto"))
    package = f"{MODULE}/v1;mlxstreamv1"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    for name, module in PLUGINS.items():
        kind = name.removeprefix("protoc-gen-")
        command += [f"--plugin={name}={plugin_folder(module) / name}", f"--{kind}_out={output}"]
        command += [f"--{kind}_opt=module={MODULE}", *(f"--{kind}_opt=M{source}={package}" for source in sources)]
    subprocess.run([*command, *sources], check=True)


if __name__ == "__main__":
    sys.exit(main())
