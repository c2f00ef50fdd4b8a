"""`mlx-stream config`: a check without a server, and every value with its source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli.main import main
from service.settings import ServerSettings
from tests.certificates import Authority

SECRET = "a-token-that-nobody-may-see"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLX_STREAM_")]:
        monkeypatch.delenv(name)


def config(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["config", *arguments])
    return result.exit_code, result.output


def test_it_shows_every_setting_and_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STREAM_MAX_ROWS", "5")
    status, output = config("--show", "--model", "m")
    assert status == 0
    lines = output.splitlines()
    assert len(lines) == len(ServerSettings.model_fields)
    assert any(line.startswith('model = "m"') and line.endswith("# flag") for line in lines)
    assert any(line.startswith("max_rows = 5") and line.endswith("# MLX_STREAM_MAX_ROWS") for line in lines)
    assert any(line.startswith("# tls_cert =") and line.endswith("# default") for line in lines)


@pytest.mark.parametrize(
    ("listen", "offered"), [("127.0.0.1:1", "true"), ("unix:/tmp/s", "true"), ("0.0.0.0:1", "false")]
)
def test_what_is_unset_is_shown_with_what_holds_then(listen: str, offered: str) -> None:
    status, output = config("--show", "--model", "m", "--listen", listen, "--insecure")
    assert status == 0
    shown = {line.rsplit("  # ", 1)[0].rstrip() for line in output.splitlines()}
    assert {f"# admin = {offered}", f"# reflection = {offered}", '# unix_socket_mode = "600"'} <= shown
    assert {f"# checkpoint_bytes = {8 * 2**30}", f"# prefix_cache_disk_bytes = {8 * 2**30}"} <= shown
    assert "# state_bytes =" in shown, "the machine decides it"


def test_what_is_set_is_no_comment() -> None:
    status, output = config("--show", "--model", "m", "--no-admin", "--checkpoint-bytes", "0")
    shown = {line.rsplit("  # ", 1)[0].rstrip() for line in output.splitlines()}
    assert status == 0
    assert {"admin = false", "checkpoint_bytes = 0", "# reflection = true"} <= shown


def test_tokens_and_keys_are_checked_and_never_shown(authority: Authority, tmp_path: Path) -> None:
    tokens, leaf = tmp_path / "tokens.toml", authority.issue("config")
    tokens.write_text(f'[a]\ntoken = "{SECRET}"\n')
    flags = ("--model", "m", "--listen", "0.0.0.0:1", "--tls-cert", str(leaf.certificate), "--tls-key", str(leaf.key))
    status, output = config("--show", *flags, "--tokens-file", str(tokens))
    assert status == 0
    assert SECRET not in output
    assert leaf.key.read_text().splitlines()[1] not in output
    tokens.write_text(f'[a]\ntoken = "{SECRET}"\npermissions = ["root"]\n')
    status, output = config(*flags, "--tokens-file", str(tokens))
    assert status == 1
    assert output.startswith("Error: --tokens-file: tokens.toml: a: permissions must be of")
    assert SECRET not in output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "model: must be given"),
        (("--model", "m", "--listen", "0.0.0.0:1"), "--insecure"),
        (("--model", "m", "--listen", "nowhere"), "is not HOST:PORT"),
        (("--model", "m", "--max-rows", "0"), "--max-rows: must be at least 1"),
        (("--model", "m", "--metrics-listen", "nowhere"), "--metrics-listen"),
        (("--model", "m", "--adapter", "a=/no/such/folder"), "--adapter: a: there is no folder"),
        (("--engine", "script:/no/such/file"), "No such file"),
    ],
)
def test_what_serve_would_refuse_is_refused_in_one_line(flags: tuple[str, ...], told: str) -> None:
    status, output = config(*flags)
    assert status == 1
    assert told in output
    assert len(output.splitlines()) == 1


def test_a_good_configuration_is_said_to_be_good() -> None:
    assert config("--model", "m") == (0, "the configuration can be used\n")


def test_traces_without_the_means_to_send_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "service.tracing_spans", None)
    status, output = config("--model", "m", "--otlp-endpoint", "http://127.0.0.1:4317")
    assert status == 1
    assert "needs OpenTelemetry" in output
