"""Generates the Python code of the schema into the client package, or checks that the committed code is fresh.

The compiler is pinned: its output loads under every protobuf and grpcio release that the client supports, and no
older one. The schema's path is the import path, and the output is one copy that server and client share.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

COMPILERS = {"grpcio-tools": "1.80.0", "mypy-protobuf": "5.1.0"}
PROTO_ROOT = Path(__file__).resolve().parent
PACKAGE = Path("mlxstream/v1")
OUTPUT_ROOT = PROTO_ROOT.parent / "clients" / "python" / "src"
INIT = '"""Generated code of the schema `mlxstream.v1`: one module per file, services in `*_pb2_grpc`."""\n'


class GenerationError(Exception):
    """The code cannot be generated; the message says why."""


def require_pinned_compilers() -> None:
    """Refuse compilers whose output would differ from the committed one."""
    for name, wanted in COMPILERS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise GenerationError(f"needs {name}=={wanted}, found {found}; install the project's extra 'check'")


def run_protoc(sources: list[str], *outputs: str) -> None:
    """Run the compiler over `sources`, which are relative to the schema's root."""
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
    result = subprocess.run(
        [*command, f"--plugin=protoc-gen-mypy_grpc={plugin}", *outputs, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise GenerationError(result.stderr.strip())


def files_with_services(sources: list[str]) -> list[str]:
    """The sources that declare a service; only those need stubs."""
    with tempfile.TemporaryDirectory() as folder:
        descriptor_set = Path(folder) / "schema.binpb"
        run_protoc(sources, f"--descriptor_set_out={descriptor_set}")
        parsed = FileDescriptorSet.FromString(descriptor_set.read_bytes())
    return [file.name for file in parsed.file if file.service]


def generate(output_root: Path) -> None:
    """Write the package below `output_root`, which must not hold it yet."""
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    run_protoc(sources, f"--python_out={output_root}", f"--pyi_out={output_root}")
    run_protoc(files_with_services(sources), f"--grpc_python_out={output_root}", f"--mypy_grpc_out={output_root}")
    (output_root / PACKAGE / "__init__.py").write_text(INIT)


def package_files(root: Path) -> dict[str, bytes]:
    """Contents of the package below `root`, by file name."""
    paths = (root / PACKAGE).glob("*.py*")
    return {path.name: path.read_bytes() for path in paths if path.suffix in {".py", ".pyi"}}


def stale_files(fresh: dict[str, bytes], committed: dict[str, bytes]) -> list[str]:
    """Names of the files that differ, are missing, or have no source any more."""
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def write(fresh: dict[str, bytes]) -> None:
    """Make the committed package equal to `fresh`."""
    target = OUTPUT_ROOT / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    for name in stale_files(fresh, package_files(OUTPUT_ROOT)):
        if name in fresh:
            (target / name).write_bytes(fresh[name])
        else:
            (target / name).unlink()


def main() -> int:
    """Generate, or with `--check` report what is stale. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the committed code is stale")
    check = parser.parse_args().check
    try:
        require_pinned_compilers()
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            fresh = package_files(Path(folder))
    except GenerationError as error:
        sys.stderr.write(f"generate.py: {error}\n")
        return 1
    if not check:
        write(fresh)
        return 0
    stale = stale_files(fresh, package_files(OUTPUT_ROOT))
    if stale:
        sys.stderr.write(f"stale generated code: {', '.join(stale)}; run `python proto/generate.py` and commit\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
