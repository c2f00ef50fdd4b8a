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
        assert (await generated(target, *identity)).exit_code == 1
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
