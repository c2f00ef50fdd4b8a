"""What the documents name is there: links, files of this repository, and the folders of the house."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from tests.test_house_rules import ROOT, named, text_files

FILE = re.compile(r"`((?:[\w.*-]+/)*[\w*-]+\.(?:py|sh|md|proto))`")
LINK = re.compile(r"\]\(([^)#\s:]+)[)#]")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\.\w+$")
STOREY = re.compile(r"( {0,8})([\w./-]+)/(?: |$)")


def documents() -> list[Path]:
    """Every document in Markdown."""
    return [path for path in text_files() if path.suffix == ".md"]


def storeys() -> set[str]:
    """Folders in the drawing of the house, as paths."""
    drawing = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1]
    found: set[str] = set()
    above: list[str] = []
    for line in drawing.splitlines():
        if (storey := STOREY.match(line)) is not None:
            above[len(storey[1]) // 2 :] = [storey[2]]
            found.add("/".join(above))
    return found


def test_every_link_leads_somewhere() -> None:
    links = {(path, link) for path in documents() for link in LINK.findall(path.read_text(encoding="utf-8"))}
    assert len(links) > 20
    assert [(named(path), link) for path, link in links if not (path.parent / link).exists()] == []


def test_every_file_that_is_named_exists() -> None:
    files = ["/" + named(path) for path in text_files()]
    written = {(path, name) for path in documents() for name in FILE.findall(path.read_text(encoding="utf-8"))}
    meant = {(path, name) for path, name in written if not PLACEHOLDER.search(name)}
    assert len(meant) > 50
    assert [(named(path), name) for path, name in meant if not fnmatch.filter(files, f"*/{name}")] == []


def test_the_house_that_is_drawn_is_the_one_that_stands() -> None:
    drawn = storeys()
    assert [folder for folder in drawn if not (ROOT / folder).is_dir()] == []
    assert {named(path.parent) for path in (ROOT / "engine").rglob("__init__.py")} - drawn == set()
