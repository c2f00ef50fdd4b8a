"""The generator notices every way in which committed code can be stale."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROTO = Path(__file__).resolve().parents[2] / "proto"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_changed_missing_and_orphaned_files_are_stale(generator: ModuleType) -> None:
    fresh = {"same.py": b"1", "changed.py": b"2", "missing.py": b"3"}
    committed = {"same.py": b"1", "changed.py": b"x", "orphan.py": b"4"}
    assert generator.stale_files(fresh, committed) == ["changed.py", "missing.py", "orphan.py"]
    assert generator.stale_files(fresh, fresh) == []


def test_every_file_of_the_schema_has_its_committed_module(generator: ModuleType) -> None:
    committed = generator.package_files(generator.OUTPUT_ROOT)
    expected = {f"{path.stem}_pb2.py" for path in (PROTO / "mlxstream/v1").glob("*.proto")}
    assert expected == {name for name in committed if name.endswith("_pb2.py")}
    assert {name for name in committed if name.endswith("_pb2_grpc.py")} == {
        "admin_pb2_grpc.py",
        "generation_pb2_grpc.py",
        "model_pb2_grpc.py",
    }


def test_other_compilers_are_refused_by_name(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "COMPILERS", {"grpcio": "0.0.0"})
    with pytest.raises(generator.GenerationError, match=r"needs grpcio==0\.0\.0"):
        generator.require_pinned_compilers()
