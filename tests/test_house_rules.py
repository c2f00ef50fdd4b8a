"""The house rules that a machine can hold: sizes, names, layers, and nothing of one machine in the repository."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("engine", "service", "clients/conformance", "clients/python", "tests", "benchmarks")
GENERATED = ROOT / "clients/python/src/mlxstream/v1"
LINE_LIMIT = 500
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "base", "misc", "manager"}
CLIENT_SUFFIXES = {".go", ".java", ".rs", ".ts", ".xml"}
TEXT_SUFFIXES = {".c", ".cfg", ".md", ".proto", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", "", *CLIENT_SUFFIXES}
UNREAD_FOLDERS = {".git", ".venv", "build", "dist", "node_modules", "target", "__pycache__"}
OWN_FOLDER = re.compile(r"(?<![\w./-])/(?:r[o]ot|h[o]me/\w+|U[s]ers/\w+|w[o]rk|tmp/w)(?=[/\s\"']|$)")


def python_files() -> Iterator[Path]:
    """Every hand-written Python file."""
    for folder in PYTHON_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_relative_to(GENERATED) and UNREAD_FOLDERS.isdisjoint(path.relative_to(ROOT).parts):
                yield path


def text_files() -> Iterator[Path]:
    """Every text file that belongs to the repository."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if path.is_file() and path.suffix in TEXT_SUFFIXES and not hidden and UNREAD_FOLDERS.isdisjoint(parts):
            yield path


def named(path: Path) -> str:
    """The path as a reader would type it."""
    return path.relative_to(ROOT).as_posix()


def settings() -> dict[str, object]:
    """What `pyproject.toml` says to the import linter."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linter: dict[str, object] = document["tool"]["importlinter"]
    return linter


def test_the_walk_finds_the_house() -> None:
    found = {named(path) for path in python_files()}
    assert {"engine/contracts/errors.py", "tests/test_house_rules.py"} <= found
    assert not [name for name in found if name.startswith("clients/python/src/mlxstream/v1/")]
    assert {"Makefile", "pyproject.toml"} <= {named(path) for path in text_files()}


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > LINE_LIMIT} == {}


def test_modules_are_named_by_what_they_hold() -> None:
    vague = [named(path) for path in python_files() if VAGUE_NAMES & {*path.stem.split("_"), path.parent.name}]
    assert vague == []


def test_every_folder_of_the_engine_has_a_floor() -> None:
    contracts = settings()["contracts"]
    assert isinstance(contracts, list)
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = {name.strip() for layer in layers for name in re.split("[|:]", layer)}
    folders = {path.parent.name for path in (ROOT / "engine").glob("*/__init__.py")}
    assert folders - placed == set()


def test_type_only_imports_count_as_imports() -> None:
    assert settings()["exclude_type_checking_imports"] is False


@pytest.mark.parametrize("folder", ["engine", "service"])
def test_nothing_is_probed_with_hasattr(folder: str) -> None:
    probes = [
        f"{named(path)}:{node.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "hasattr"
    ]
    assert probes == []


def test_errors_for_callers_stand_where_the_table_of_statuses_looks_for_them() -> None:
    """A class elsewhere would only be seen by who imports its module; see `tests/service/test_errors.py`."""
    homes = {"engine/contracts/errors.py", "service/refusals.py"}
    classes = [
        (named(path), node.name, {getattr(one, "attr", getattr(one, "id", "")) for one in node.bases})
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in ("engine", "service")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    tree, before = {"EngineError"}, 0
    while len(tree) > before:
        before = len(tree)
        tree |= {name for _, name, bases in classes if bases & tree}
    assert len(tree) > 15
    assert {where for where, name, _ in classes if name in tree} == homes


def test_the_repository_holds_no_path_of_one_machine() -> None:
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if OWN_FOLDER.search(line)
    ]
    assert found == []


def test_the_pattern_of_machine_paths_knows_one() -> None:
    assert OWN_FOLDER.search("cd /" + "root/x") is not None
    assert OWN_FOLDER.search("open('/" + "home/someone/x')") is not None
    assert OWN_FOLDER.search("engine/work/x and a/root/b") is None


@pytest.mark.parametrize("file", ["constraints.txt", "pyproject.toml", "clients/python/pyproject.toml"])
def test_packages_are_pinned_by_name_and_never_by_address(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\s*--?(?:index-url|extra-index-url|find-links|i|f)\b.*|\S+ @ \S+", text) == []
    assert re.findall(r"https?://\S+", text) == []
