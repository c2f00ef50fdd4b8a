"""The probe that container engines run: its status is the server's health."""

from __future__ import annotations

import asyncio

import pytest

from service.probe import main
from service.readiness import NotReady
from service.tls import Tls, TlsFiles
from tests.certificates import Authority
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Serving, serve


async def status(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_its_status_follows_health_and_a_failure_has_one_line(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(serving.address)
    assert await status(target) == 1
    serving.health.report(NotReady.NO_MODEL, alive=True)
    assert await status(target) == 0
    assert await status(target, "mlxstream.v1.GenerationService") == 1
    serving.health.report(None)
    assert await status(target, "mlxstream.v1.GenerationService") == 0
    assert await status(target, "no.such.Service") == 1
    assert capsys.readouterr().err.splitlines() == [
        f"probe: {target}: it is NOT_SERVING",
        f"probe: {target} mlxstream.v1.GenerationService: it is NOT_SERVING",
        f"probe: {target} no.such.Service: it has no such service",
    ]


def test_nobody_there_is_a_failure_and_no_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "probe: 127.0.0.1:1: Connection refused\n"
    for arguments in ([], ["--tls"], ["a:1", "b", "c"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("usage")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_it_says_what_it_takes(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert "TARGET [SERVICE]" in capsys.readouterr().out


async def test_a_server_that_wants_tls_is_said_to(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    leaf = authority.issue("probed")
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key))
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials()) as running:
        assert await status(str(running.address)) == 1
    assert "it may want TLS" in capsys.readouterr().err
