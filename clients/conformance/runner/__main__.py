"""`python -m clients.conformance.runner`: builds the programs, plays all cases, judges, and writes the table."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from clients.conformance.runner.expecting import comparable
from clients.conformance.runner.playing import Play
from clients.conformance.runner.programs import Program, ProgramError
from clients.conformance.runner.stage import Stage
from clients.conformance.runner.table import Verdict, write_table
from clients.conformance.runner.third_party import ToolReport, check_tools, install_tools

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "clients/conformance"
BUILD = ROOT / "build/conformance"
REFERENCE = "python"
BUILD_SECONDS = 900
SHOWN_LINES = 30
SIDE_BY_SIDE = 2
Case = Mapping[str, Any]


def main() -> int:
    """Run; the status is 0 when every language was built whose tools are here, and nothing failed unexpectedly."""
    arguments = _arguments()
    document = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    cases = [case for case in document["cases"] if not arguments.cases or case["name"] in arguments.cases]
    languages, skipped = _available(arguments.languages)
    BUILD.mkdir(parents=True, exist_ok=True)
    run = Run(cases, document["servers"])
    asyncio.run(run.play(languages, with_tools=not arguments.no_tools))
    verdicts, tools = run.verdicts, run.tools
    _expect_failures(verdicts)
    notes = [f"Not run: {reason}." for reason in skipped + run.broken] + [_told(tool) for tool in tools]
    if not arguments.cases and not arguments.languages:
        write_table(ROOT / "docs/conformance.md", cases, verdicts, notes)
    return _report(verdicts, tools, broken=run.broken, skipped=skipped, strict=arguments.strict)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--languages", nargs="*", help="play with these only")
    parser.add_argument("--cases", nargs="*", help="play these only")
    parser.add_argument("--no-tools", action="store_true", help="leave grpcurl, grpc_health_probe and ghz out")
    parser.add_argument("--strict", action="store_true", help="a language whose tools are not here is a failure too")
    return parser.parse_args()


def _available(wanted: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Languages whose tools are here, and why the others are left out."""
    found, skipped = [], []
    for entry in json.loads((HERE / "clients.json").read_text(encoding="utf-8")):
        language = entry["language"]
        if wanted and language not in wanted:
            continue
        missing = [tool for tool in entry["needs"] if shutil.which(tool) is None]
        if not (ROOT / f"clients/{language}/conformance/run.sh").exists():
            skipped.append(f"{language}: has no program yet")
        elif missing:
            skipped.append(f"{language}: needs {' and '.join(missing)}")
        else:
            found.append(language)
    return found, skipped


class Run:
    """All languages, one after the other built and then played side by side. Afterwards it knows how each case went."""

    def __init__(self, cases: Sequence[Case], servers: Mapping[str, Any]) -> None:
        self._cases = cases
        self._servers = servers
        self._answers: dict[str, dict[str, Any]] = {}
        self._turn = asyncio.Semaphore(SIDE_BY_SIDE)
        self.verdicts: dict[str, dict[str, Verdict]] = {}
        self.tools: list[ToolReport] = []
        self.broken: list[str] = []

    async def play(self, languages: Sequence[str], *, with_tools: bool) -> None:
        """Build and play `languages`, compare what they told, and let tools that are not ours have their turn."""
        folder = Path(tempfile.mkdtemp(prefix="servers-", dir=BUILD))
        stage = Stage(ROOT, folder, self._servers)
        stage.prepare()
        installing = asyncio.to_thread(install_tools, ROOT / "build/tools") if with_tools else _no_tools()
        tools = asyncio.create_task(installing)
        try:
            async with asyncio.TaskGroup() as playing:
                for language in languages:
                    if problem := await asyncio.to_thread(_build, language):
                        self.broken.append(f"{language}: does not build: {problem}")
                    else:
                        playing.create_task(self._play_language(language, stage))
            order = [language for language in languages if language in self.verdicts]
            self.verdicts = {language: self.verdicts[language] for language in order}
            _compare(self.verdicts, self._answers, {case["name"] for case in self._cases if case.get("by_chance")})
            if installed := await tools:
                server = await stage.server("plain", own=False)
                self.tools = await asyncio.to_thread(check_tools, installed, server.target)
        finally:
            await stage.close()
        if all(verdict.outcome == "passed" for by_case in self.verdicts.values() for verdict in by_case.values()):
            shutil.rmtree(folder, ignore_errors=True)

    async def _play_language(self, language: str, stage: Stage) -> None:
        verdicts: dict[str, Verdict] = {}
        self._answers[language] = {}
        async with self._turn:
            started = time.monotonic()
            program = await _program(language)
            # What fails is played once more at the end, and told: the clocks of a crowded machine are not the client's.
            for again in (False, True):
                for case in self._cases:
                    if again and verdicts[case["name"]].outcome == "passed":
                        continue
                    play = Play(case, program, stage)
                    await play.run()
                    verdicts[case["name"]] = Verdict("failed" if play.failures else "passed", play.failures)
                    self._answers[language][case["name"]] = play.answers
                    if play.failures:
                        again_told, told = " again" if again else "", "; ".join(play.failures)
                        _say(f"{language}: {case['name']} failed{again_told}: {told}")
                    if program.has_ended:
                        program = await _program(language)
            try:
                await program.end()
            except ProgramError as error:
                verdicts[self._cases[-1]["name"]] = Verdict("failed", [str(error)])
        self.verdicts[language] = verdicts
        passed = sum(verdict.outcome == "passed" for verdict in verdicts.values())
        _say(f"{language}: {passed} of {len(self._cases)} passed in {time.monotonic() - started:.0f} s")


async def _no_tools() -> dict[str, Path | str]:
    return {}


def _build(language: str) -> str:
    """Build a program; returns what went wrong, and shows the end of what was said."""
    script, started = ROOT / f"clients/{language}/conformance/build.sh", time.monotonic()
    if not script.exists():
        return ""
    path, problem = BUILD / f"{language}-build.log", ""
    with path.open("wb") as log:
        try:
            subprocess.run(["sh", str(script)], cwd=ROOT, stdout=log, stderr=log, check=True, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            problem = f"took more than {BUILD_SECONDS} s"
        except subprocess.CalledProcessError as error:
            problem = f"status {error.returncode}, see {path.relative_to(ROOT)}"
    if problem:
        _say("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]))
    else:
        _say(f"built {language} in {time.monotonic() - started:.0f} s")
    return problem


async def _program(language: str) -> Program:
    return await Program.start(language, ROOT, BUILD / f"{language}.log")


def _compare(
    verdicts: Mapping[str, dict[str, Verdict]], answers: Mapping[str, Mapping[str, Any]], by_chance: Set[str]
) -> None:
    """Let a case fail where a language tells something else than the reference about the same conversation.

    Cases whose outcome is decided `by_chance` are not compared.
    """
    reference = answers.get(REFERENCE)
    if reference is None:
        return
    for language, by_case in answers.items():
        for case, told in by_case.items():
            for name, answer in told.items():
                if case in by_chance or name not in reference[case]:
                    continue
                ours, theirs = comparable(reference[case][name]), comparable(answer)
                if ours != theirs:
                    unlike = {key: (ours.get(key), theirs.get(key)) for key in ours if ours[key] != theirs.get(key)}
                    verdict = verdicts[language][case]
                    verdict.outcome = "failed"
                    verdict.failures.append(f"{name}: not as {REFERENCE} tells it: {unlike or theirs}")


def _expect_failures(verdicts: Mapping[str, dict[str, Verdict]]) -> None:
    """Mark failures that are listed; a listed one that passes has to leave the list."""
    for entry in json.loads((HERE / "expected_failures.json").read_text(encoding="utf-8")):
        verdict = verdicts.get(entry["language"], {}).get(entry["case"])
        if verdict is None:
            continue
        if verdict.outcome == "failed":
            verdict.outcome = "expected"
        else:
            verdict.outcome = "failed"
            verdict.failures.append("passes, and is listed in expected_failures.json")


def _report(
    verdicts: Mapping[str, Mapping[str, Verdict]],
    tools: Sequence[ToolReport],
    *,
    broken: Sequence[str],
    skipped: Sequence[str],
    strict: bool,
) -> int:
    failed = len(broken)
    for language, by_case in verdicts.items():
        for case, verdict in by_case.items():
            if verdict.outcome == "failed":
                failed += 1
                _say(f"✗ {language} {case}")
                for failure in verdict.failures:
                    _say(f"    {failure}")
    for problem in broken:
        _say(f"✗ {problem}")
    for reason in skipped:
        _say(f"not run: {reason}")
    for tool in tools:
        _say(_told(tool))
    failed += sum(tool.outcome == "failed" for tool in tools) + (len(skipped) if strict else 0)
    return 1 if failed or not verdicts else 0


def _told(tool: ToolReport) -> str:
    return f"{tool.tool}: {tool.outcome}{f' ({tool.detail})' if tool.detail else ''}."


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
