"""The table of languages and cases in the documentation, written from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARKS = {"passed": "✓", "failed": "✗", "expected": "(✗)", "skipped": "not run"}
HEAD = """# Conformance of the clients

Written by `make conformance`; do not edit. Every client plays the same cases against the real service over a scripted
engine; [the contract](../clients/conformance/README.md) says how. ✓ passed, ✗ failed, (✗) failed as expected.
"""


@dataclass(slots=True)
class Verdict:
    """How one case went in one language: `passed`, `failed`, `expected` (to fail) or `skipped`, and why."""

    outcome: str
    failures: list[str] = field(default_factory=list)


Verdicts = Mapping[str, Mapping[str, Verdict]]


def write_table(path: Path, cases: Sequence[Mapping[str, Any]], verdicts: Verdicts, notes: Sequence[str]) -> None:
    """Write the table of `verdicts`, which are by language and name of the case."""
    languages = list(verdicts)
    lines = [HEAD, f"| case | {' | '.join(languages)} | what must hold |", "|---|" + ":-:|" * len(languages) + "---|"]
    for case in cases:
        marks = [MARKS[verdicts[language][case["name"]].outcome] for language in languages]
        lines.append(f"| {case['name']} | {' | '.join(marks)} | {case['about']} |")
    passed = sum(verdict.outcome == "passed" for by_case in verdicts.values() for verdict in by_case.values())
    lines += ["", f"{passed} of {len(cases) * len(languages)} passed.", *(f"\n{note}" for note in notes)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
