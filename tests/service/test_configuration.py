"""What is shown of a configuration: every setting, where it came from, and text that can be used as a file."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from service.configuration import SettingsError, explain_settings, load_settings
from service.settings import ServerSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLX_STREAM_")]:
        monkeypatch.delenv(name)


def test_every_setting_is_told_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text('model = "file"\nmax_rows = 3\nmax_queue = 4\n')
    monkeypatch.setenv("MLX_STREAM_MAX_ROWS", "5")
    monkeypatch.setenv("MLX_STREAM_BLAS", "")
    explained = {one.name: one for one in explain_settings({"model": "flag"}, file, {})}
    assert set(explained) == set(ServerSettings.model_fields)
    told = {name: (explained[name].toml, explained[name].source) for name in ("model", "max_rows", "max_queue", "blas")}
    assert told == {
        "model": ('"flag"', "flag"),
        "max_rows": ("5", "MLX_STREAM_MAX_ROWS"),
        "max_queue": ("4", "server.toml"),
        "blas": ('"auto"', "default"),
    }
    assert explained["state_bytes"].toml is None


@pytest.mark.parametrize(
    "flags",
    [
        {"model": 'a "quoted" \\ name\twith\nlines \x7f é'},
        {"model": "m", "adapters": ("a=x=1", "b.c=/y")},
        {"model": "m", "insecure": True, "listen": "0.0.0.0:1", "admin": False, "shutdown_grace_seconds": 0.25},
        {"model": "m", "listen": "unix:/tmp/s", "unix_socket_mode": "0660", "state_bytes": 2**40},
    ],
)
def test_what_is_shown_can_be_used_as_a_file(tmp_path: Path, flags: dict[str, Any]) -> None:
    shown = [f"{one.name} = {one.toml}" for one in explain_settings(flags, None, {}) if one.is_set]
    file = tmp_path / "shown.toml"
    file.write_text("\n".join(shown))
    assert tomllib.loads(file.read_text())
    assert load_settings({}, file) == load_settings(flags, None)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"tls_cert": "c"}, "^tls_cert needs tls_key$"),
        ({"tls_key": "k"}, "^--tls-key: needs tls_cert$"),
        ({"tls_client_ca": "a"}, "^--tls-client-ca: needs tls_cert$"),
        ({"tls_cert": "c", "tls_key": "k", "insecure": True}, "^--tls-cert: contradicts insecure$"),
        ({"unix_socket_mode": "660"}, "^--unix-socket-mode: has no meaning unless listen is unix:PATH$"),
        ({"unix_socket_mode": "rw", "listen": "unix:/s"}, "^--unix-socket-mode: "),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load_settings({"model": "m", **flags}, None)
