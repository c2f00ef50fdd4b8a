"""The examples run as they stand, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.python.scripted_server import Behaviour, ThreadedServer, answer, endless

CLIENT = Path(__file__).resolve().parents[3] / "clients" / "python"
EXAMPLES = CLIENT / "examples"
CASES: dict[str, tuple[Behaviour, str]] = {
    "stream": (answer("Elbe, ", "Ganges, ", "Nile"), "Elbe, Ganges, Nile\nstop: 3 tokens, 5.0 per second\n"),
    "cancel": (endless, "left after 'more '\ngave up after half a second\ncancelled after "),
    "deadline": (endless, "failed: DEADLINE_EXCEEDED\ngot "),
    "admin": (answer("Hello"), "serving tiny\nthis server has no service for operators\n"),
    "resume": (answer("Once ", "upon "), "Once upon \nresume g1 after 4\nOnce upon \n"),
    "chat": (
        answer("Paris."),
        "> What is the capital of France?\nParis.\n> And which river runs through it?\nParis.\n",
    ),
}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ThreadedServer]:
    running = ThreadedServer(request.param)
    yield running
    running.close()


def test_every_example_has_a_case() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize(
    ("server", "name", "expected"),
    [(behaviour, name, expected) for name, (behaviour, expected) in CASES.items()],
    ids=CASES,
    indirect=["server"],
)
def test_an_example_runs(server: ThreadedServer, name: str, expected: str) -> None:
    assert_says(expected, str(EXAMPLES / f"{name}.py"), server.scripted.target)


@pytest.mark.parametrize("server", [answer("Elbe, ", "Ganges, ", "Nile")], indirect=True)
def test_what_the_readme_shows_first_runs(server: ThreadedServer) -> None:
    shown = re.search(r"```python\n(.*?)```", (CLIENT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert_says("Elbe, Ganges, Nile", "-c", shown.group(1).replace("127.0.0.1:50051", server.scripted.target))


def assert_says(expected: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(expected)
