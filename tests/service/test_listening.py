"""What an address asks for, what is offered there, and what the log says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from service.lifecycle import run_server
from service.listening import checked_entrance, permitted_address
from service.offer import offer_of, tell_entrance
from service.settings import ServerSettings
from service.stopping import Signals, StartError
from tests.certificates import Authority

TOKEN = "a-token-of-enough-characters"


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(**{"model": "m", **values})


def tls_of(authority: Authority, *, client_ca: bool = False) -> dict[str, Any]:
    leaf = authority.issue("listening")
    files = {"tls_cert": leaf.certificate, "tls_key": leaf.key}
    return {**files, "tls_client_ca": authority.certificate} if client_ca else files


def tokens_in(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[a]\ntoken = "{TOKEN}"\n')
    path.chmod(0o600)
    return {"tokens_file": path}


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"])
def test_an_address_that_others_can_reach_needs_tls_or_consent(authority: Authority, listen: str) -> None:
    with pytest.raises(StartError, match="--tls-cert and --tls-key, or allow it with --insecure"):
        permitted_address(settings(listen=listen))
    assert str(permitted_address(settings(listen=listen, insecure=True))) == listen
    assert str(permitted_address(settings(listen=listen, **tls_of(authority)))) == listen


def test_a_unix_socket_takes_no_certificate(authority: Authority) -> None:
    with pytest.raises(StartError, match="a Unix socket is not encrypted"):
        permitted_address(settings(listen="unix:/s", **tls_of(authority)))


@pytest.mark.parametrize(("name", "told"), [("tokens_file", "--tokens-file"), ("tls_client_ca", "--tls-client-ca")])
async def test_a_file_that_cannot_be_used_is_one_line_before_anything_is_loaded(
    authority: Authority, tmp_path: Path, name: str, told: str
) -> None:
    def load(_settings: object) -> Any:
        raise AssertionError("the engine was made")

    wrong = settings(listen="127.0.0.1:0", **{**tls_of(authority), name: tmp_path / "none"})
    with pytest.raises(StartError, match=f"{told}: none: No such file or directory"):
        await run_server(wrong, Signals(), engine_class=load)


@pytest.mark.parametrize(
    ("listen", "asked", "offered"),
    [
        ("127.0.0.1:0", {}, (True, True, False)),
        ("unix:{folder}/s", {}, (True, True, False)),
        ("0.0.0.0:0", {}, (False, False, False)),
        ("0.0.0.0:0", {"admin": True, "reflection": True, "channelz": True}, (True, True, True)),
        ("127.0.0.1:0", {"admin": False, "reflection": False}, (False, False, False)),
    ],
)
def test_services_of_operators_and_tools_are_off_where_others_can_reach_them(
    tmp_path: Path, listen: str, asked: dict[str, bool], offered: tuple[bool, bool, bool]
) -> None:
    insecure = listen.startswith("0.0.0.0")
    given = settings(listen=listen.format(folder=tmp_path), insecure=insecure, **asked)
    offer = offer_of(given, checked_entrance(given))
    assert (offer.admin, offer.reflection, offer.channelz) == offered


def test_the_log_says_what_was_bound_and_how_it_is_protected(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = settings(listen="0.0.0.0:0", **tls_of(authority, client_ca=True), **tokens_in(tmp_path))
    entrance = checked_entrance(given)
    tell_entrance(entrance.address, entrance, offer_of(given, entrance))
    (record,) = [record for record in caplog.records if record.message == "listening"]
    fields = {name: str(value) for name, value in record.fields.items()}  # type: ignore[attr-defined]
    assert fields == {
        "address": "0.0.0.0:0",
        "encryption": "tls",
        "client_certificates": "required",
        "tokens": "required",
        "admin": "off",
        "reflection": "off",
        "channelz": "off",
    }
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(("with_tokens", "warned"), [(False, "everybody who can reach"), (True, "travel unencrypted")])
def test_an_entrance_that_is_too_open_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_tokens: bool, warned: str
) -> None:
    given = settings(listen="0.0.0.0:0", insecure=True, **(tokens_in(tmp_path) if with_tokens else {}))
    entrance = checked_entrance(given)
    tell_entrance(entrance.address, entrance, offer_of(given, entrance))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warned in warnings[0]
