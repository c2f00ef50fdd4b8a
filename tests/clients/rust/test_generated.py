"""The committed stubs of the Rust client: those of every other language are made when it is built."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GENERATED = ROOT / "clients" / "rust" / "src" / "generated"


def recorded() -> dict[str, str]:
    lines = (GENERATED / "fresh.sha256").read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}


def test_stubs_are_those_of_the_schema_as_it_is() -> None:
    sources = [*(ROOT / "proto").rglob("*.proto"), GENERATED / "mlxstream.v1.rs"]
    found = {path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    assert found == recorded(), "run `make generate`"
