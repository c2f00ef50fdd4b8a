"""`mlx-stream serve` fails with an exit code and one line that says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli.main import COMMANDS, main
from service.cli.serve import serve
from service.settings import ServerSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLX_STREAM_")]:
        monkeypatch.delenv(name)


def test_the_help_page_lists_every_command_without_importing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", None)
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(f"  {name} " in result.output for name in COMMANDS)


def test_an_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(main, ["serv"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model: must be given, such as smollm2-135m"),
        (["--model", "m", "--listen", "nowhere"], "--listen: 'nowhere' is not HOST:PORT"),
        (["--model", "m", "--listen", "0.0.0.0:1"], "allow it with --insecure"),
        (["--model", "m", "--max-rows", "0"], "--max-rows: must be at least 1"),
        (["--model", "m", "--max-rows", "5000"], "--max-rows: must be at most 4096"),
        (["--model", "m", "--device", "tpu"], "--device: must be 'auto', 'cpu', 'metal' or 'cuda'"),
        (["--model", "m", "--adapter", "a"], "--adapter: must be NAME=FOLDER"),
        (["--model", "m", "--listen", "unix:s", "--unix-socket-mode", "9"], "must be three octal digits, such as 660"),
        (["--model", "m", "--otlp-endpoint", "h:1"], "--otlp-endpoint: must be http://HOST:PORT or https://HOST:PORT"),
        (["--model", "nosuch", "--listen", "127.0.0.1:0"], "cannot load the model: no model named 'nosuch'; known: "),
        (["--model", "./nosuch", "--listen", "127.0.0.1:0"], "cannot load the model: nosuch: no such file or folder"),
        (["--model", "m", "--config", "none.toml"], "none.toml: No such file"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["serve", "--state-dir", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("mlx-stream serve: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_setting_has_its_flag_and_every_flag_its_setting() -> None:
    flags = {parameter.name for parameter in serve.params}
    assert flags == set(ServerSettings.model_fields) | {"config_file"}
