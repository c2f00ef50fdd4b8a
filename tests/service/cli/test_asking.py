"""Commands that ask a server which encrypts, and which wants to know who asks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from service.access import Access
from service.cli.main import main
from service.offer import Offer
from service.tls import Tls, TlsFiles
from service.tokens import followed_tokens
from tests.certificates import Authority
from tests.service.fake_engine import FakeEngine
from tests.service.harness import serve

TOKEN = "a-token-of-enough-characters"


async def generated(target: str, *flags: str | Path) -> Result:
    arguments = ["generate", "hi", "--raw", "--target", target, "--timeout", "20", *map(str, flags)]
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def test_an_answer_comes_over_tls_with_a_certificate_and_a_token(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokens, token_file = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text(f'[team]\ntoken = "{TOKEN}"\n')
    token_file.write_text(f"{TOKEN}\n")
    leaf, own = authority.issue("asked"), authority.issue("asking")
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key, client_ca=authority.certificate))
    identity = ("--ca", authority.certificate, "--cert", own.certificate, "--key", own.key)
    offer = Offer(access=Access(followed_tokens(tokens)))
    credentials = authority.client_credentials(own)
    async with serve(FakeEngine(), offer, tls=tls, credentials=credentials) as running:
        target = str(running.address)
        answered = await generated(target, *identity, "--token-file", token_file)
        assert (answered.exit_code, answered.stdout) == (0, "Hello!\n")
        unknown = await generated(target, *identity)
        assert unknown.exit_code == 2
        assert "bearer token; give --token-file FILE" in " ".join(unknown.output.split())
        strange = await generated(target, "--ca", authority.certificate)
        assert strange.exit_code == 69
        assert "a certificate (--cert, --key)" in strange.output
        assert TOKEN not in caplog.text
        (end,) = [record for record in caplog.records if record.message == "generation finished"]
        assert end.fields["caller"] == "team"  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", [("--cert", "{file}"), ("--key", "{file}"), ("--cert", "{file}", "--key", "{file}")])
async def test_half_an_identity_is_wrong_usage(tmp_path: Path, flags: tuple[str, ...]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    result = await generated("127.0.0.1:1", *(flag.format(file=file) for flag in flags))
    assert result.exit_code == 2
    assert "need --ca" in result.output


async def test_a_mistake_about_tls_names_itself_and_is_wrong_usage(authority: Authority, tmp_path: Path) -> None:
    tls = Tls(TlsFiles(certificate=(leaf := authority.issue("asked")).certificate, key=leaf.key))
    other, elsewhere = Authority.made(tmp_path / "other"), authority.issue("elsewhere", "DNS:elsewhere.example")
    of_another_name = Tls(TlsFiles(certificate=elsewhere.certificate, key=elsewhere.key))
    async with serve(FakeEngine()) as plain:
        result = await generated(str(plain.address), "--ca", authority.certificate)
        assert (result.exit_code, result.output) == (
            2,
            f"Error: the server at {plain.address} speaks without TLS; leave out --tls, --ca, --cert and --key\n",
        )
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials(leaf)) as encrypted:
        untrusted = await generated(str(encrypted.address), "--ca", other.certificate)
        by_default = await generated(str(encrypted.address), "--tls")
        assert (untrusted.exit_code, by_default.exit_code) == (2, 2)
        assert "cannot be trusted" in untrusted.output
        assert "--ca names a file of the certificates to trust" in by_default.output
        silent = await generated(str(encrypted.address))
        assert (silent.exit_code, "what listens there may want TLS (--tls, --ca)" in silent.output) == (69, True)
    async with serve(FakeEngine(), tls=of_another_name) as misnamed:
        result = await generated(str(misnamed.address), "--ca", authority.certificate)
        assert result.exit_code == 2
        assert "is for another name; --target must use a name that it is for" in result.output


@pytest.mark.parametrize(
    "content", ["", "[team]\n", "\u00e9", "-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----"]
)
async def test_an_authority_that_holds_no_certificate_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(content, encoding="utf-8")
    result = await generated("127.0.0.1:1", "--ca", file)
    assert result.exit_code == 2
    assert f"--ca {file}: holds no PEM certificate" in result.output


async def test_a_bundle_of_authorities_may_hold_comments_in_any_language(authority: Authority, tmp_path: Path) -> None:
    leaf, bundle = authority.issue("asked"), tmp_path / "bundle.crt"
    bundle.write_text(f"# R\u00e1\u00edz\n{authority.certificate.read_text()}", encoding="utf-8")
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key))
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials()) as running:
        result = await generated(str(running.address), "--ca", bundle)
        assert (result.exit_code, result.stdout) == (0, "Hello!\n")


async def test_a_certificate_and_a_key_of_another_one_are_wrong_usage(authority: Authority) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    result = await generated("127.0.0.1:1", "--tls", "--cert", one.certificate, "--key", two.key)
    assert (result.exit_code, "do not belong together" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("content", "told"), [("", "is empty"), ("\n", "is empty"), ("\u00e9", "visible ASCII characters")]
)
async def test_a_token_file_that_holds_no_token_is_named(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    result = await generated("127.0.0.1:1", "--token-file", file)
    assert result.exit_code == 2
    assert f"--token-file {file}: " in result.output
    assert told in result.output
