"""`serve --engine script:FILE`: the whole server process over a script, and one that cannot be played."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlxstream

SCRIPT = '{"model": {"name": "play"}, "scenarios": {"count": {"say": ["one ", "two "]}}}'


def command(script: Path, state_dir: Path) -> list[str]:
    serve = [sys.executable, "-m", "service.cli", "serve", "--listen", "127.0.0.1:0"]
    return [*serve, "--engine", f"script:{script}", "--state-dir", str(state_dir)]


def test_a_server_plays_a_script_and_ends_with_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(SCRIPT, encoding="utf-8")
    with subprocess.Popen(
        command(script, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("serving play on 127.0.0.1:")
            with mlxstream.Client(line.split()[-1]) as client:
                assert client.generate("[[count]]").text == "one two "
        finally:
            server.terminate()
        assert server.wait(60) == 0


def test_a_script_that_cannot_be_played_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"scenarios": {"a": {"sey": []}}}', encoding="utf-8")
    ended = subprocess.run(command(script, tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("engine: script.json: the script.scenarios.a: unknown key 'sey'")
