"""What the clients' packages say of themselves, in whatever language: one version, and locks that anybody can use."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
POM = {"pom": "http://maven.apache.org/POM/4.0.0"}


def toml(path: str) -> dict:
    return tomllib.loads((CLIENTS / path).read_text(encoding="utf-8"))


def package_json(name: str) -> dict:
    return json.loads((CLIENTS / "typescript" / name).read_text(encoding="utf-8"))


def test_all_packages_have_one_version() -> None:
    versions = {
        "python": toml("python/pyproject.toml")["project"]["version"],
        "typescript": package_json("package.json")["version"],
        "typescript lock": package_json("package-lock.json")["version"],
        "java": ET.parse(CLIENTS / "java" / "pom.xml").findtext("pom:version", namespaces=POM),
        "rust": toml("rust/Cargo.toml")["package"]["version"],
    }
    assert set(versions.values()) == {versions["python"]}, versions


def test_the_java_readme_names_the_version() -> None:
    assert f":{toml('python/pyproject.toml')['project']['version']}`" in (CLIENTS / "java" / "README.md").read_text()


@pytest.mark.parametrize("language", ["python", "typescript", "go", "java", "rust"])
def test_every_package_carries_the_licence(language: str) -> None:
    assert (CLIENTS / language / "LICENSE").read_text() == (CLIENTS.parent / "LICENSE").read_text()


def test_locks_name_no_place_to_download_from() -> None:
    packages = package_json("package-lock.json")["packages"]
    assert len(packages) > 10
    assert not [name for name, package in packages.items() if "resolved" in package]
    sources = set(re.findall(r'^source = "(.*)"$', (CLIENTS / "rust" / "Cargo.lock").read_text(), re.MULTILINE))
    assert sources == {"registry+https://github.com/rust-lang/crates.io-index"}
