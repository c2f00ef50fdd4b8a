"""Encryption, client certificates, and files that change while the server runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from mlxstream.v1 import generation_pb2_grpc
from service.reading import UnusableFileError
from service.tls import Tls, TlsFiles
from tests.certificates import Authority, Leaf
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Serving, open_channel, read_all, serve, text_request

CODE = grpc.StatusCode


def copied(leaf: Leaf, folder: Path) -> TlsFiles:
    """The files of a server, which may be replaced."""
    folder.mkdir(exist_ok=True)
    files = TlsFiles(certificate=folder / "server.crt", key=folder / "server.key")
    shutil.copy(leaf.certificate, files.certificate)
    shutil.copy(leaf.key, files.key)
    return files


async def outcome(running: Serving, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """How a generation over a new connection ends."""
    async with open_channel(running.address, credentials) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        _, error = await read_all(stub.Generate(text_request(), timeout=10))
    return CODE.OK if error is None else error.code()


async def test_only_a_client_that_speaks_tls_and_trusts_our_authority_is_served(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    tls = Tls(copied(authority.issue("plain"), tmp_path))
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials()) as running:
        assert await outcome(running, authority.client_credentials()) is CODE.OK
        assert await outcome(running, other_authority.client_credentials()) is CODE.UNAVAILABLE
        assert await outcome(running, None) is CODE.UNAVAILABLE
        assert not tls.asks_clients


async def test_an_authority_may_have_comments_in_any_language(authority: Authority, tmp_path: Path) -> None:
    leaf, bundle = authority.issue("server"), tmp_path / "bundle.crt"
    bundle.write_bytes("# Zertifizierungsstelle für Kunden — 認証局\n".encode() + authority.certificate.read_bytes())
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key, client_ca=bundle))
    client = authority.client_credentials(authority.issue("client", "DNS:team-a"))
    async with serve(FakeEngine(), tls=tls, credentials=client) as running:
        assert await outcome(running, client) is CODE.OK


async def test_with_a_client_authority_a_client_must_present_its_certificate(
    authority: Authority, other_authority: Authority
) -> None:
    leaf = authority.issue("server")
    tls = Tls(TlsFiles(certificate=leaf.certificate, key=leaf.key, client_ca=authority.certificate))
    known = authority.issue("client", "DNS:team-a")
    stranger = other_authority.issue("stranger", "DNS:team-a")
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials(known)) as running:
        assert await outcome(running, authority.client_credentials()) is CODE.UNAVAILABLE
        assert await outcome(running, authority.client_credentials(stranger)) is CODE.UNAVAILABLE
        assert running.engine.requests == []
        assert await outcome(running, authority.client_credentials(known)) is CODE.OK
        assert [request.caller for request in running.engine.requests] == ["certificate:team-a"]


async def test_a_replaced_certificate_serves_new_connections_and_old_ones_live_on(
    authority: Authority, other_authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reloading.LOOK_SECONDS", 0)
    tls = Tls(copied(authority.issue("before"), tmp_path))
    async with serve(FakeEngine(), tls=tls, credentials=authority.client_credentials()) as running:
        assert (await read_all(running.generation.Generate(text_request())))[1] is None
        copied(other_authority.issue("after"), tmp_path)
        assert await outcome(running, other_authority.client_credentials()) is CODE.OK
        assert await outcome(running, authority.client_credentials()) is CODE.UNAVAILABLE
        assert (await read_all(running.generation.Generate(text_request())))[1] is None


async def test_files_that_do_not_belong_together_leave_the_last_good_ones_in_force(
    authority: Authority,
    other_authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("service.reloading.LOOK_SECONDS", 0)
    files = copied(authority.issue("good"), tmp_path)
    async with serve(FakeEngine(), tls=Tls(files), credentials=authority.client_credentials()) as running:
        half = other_authority.issue("half")
        shutil.copy(half.certificate, files.certificate)
        assert await outcome(running, authority.client_credentials()) is CODE.OK
        assert "server.crt and server.key do not belong together" in caplog.text
        assert str(tmp_path) not in caplog.text
        shutil.copy(half.key, files.key)
        assert await outcome(running, other_authority.client_credentials()) is CODE.OK


def test_files_that_cannot_be_used_are_refused_by_name_alone(authority: Authority, tmp_path: Path) -> None:
    leaf, folder = authority.issue("named"), tmp_path / "secret-folder"
    good = copied(leaf, folder)
    (folder / "words.crt").write_text("not a certificate")
    (folder / "empty.crt").touch()
    (folder / "large.crt").write_bytes(b"x" * (1024 * 1024 + 1))
    os.mkfifo(folder / "pipe.crt")
    encrypted = ("pkey", "-in", str(good.key), "-out", str(folder / "locked.key"), "-aes256", "-passout", "pass:secret")
    subprocess.run(["openssl", *encrypted], check=True, capture_output=True)
    shutil.copy(authority.issue("another").key, folder / "another.key")
    cases = {
        ("words.crt", "server.key", None): "hold no PEM certificate and key",
        ("server.crt", "another.key", None): "do not belong together",
        ("server.crt", "locked.key", None): "an encrypted key is not read",
        ("none.crt", "server.key", None): "none.crt: No such file",
        ("pipe.crt", "server.key", None): "pipe.crt: not a regular file",
        ("large.crt", "server.key", None): "large.crt: larger than",
        ("server.crt", "server.key", "empty.crt"): "empty.crt holds no PEM certificates",
        ("server.crt", "server.key", "words.crt"): "words.crt holds no PEM certificates",
    }
    for (certificate, key, authority_name), told in cases.items():
        client_ca = folder / authority_name if authority_name else None
        with pytest.raises(UnusableFileError, match=told) as failure:
            Tls(TlsFiles(certificate=folder / certificate, key=folder / key, client_ca=client_ca))
        assert "secret" not in str(failure.value)


def test_a_key_that_every_user_can_read_is_warned_about(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = copied(authority.issue("exposed"), tmp_path)
    files.key.chmod(0o600)
    Tls(files)
    assert "can be read by every user" not in caplog.text
    files.key.chmod(0o644)
    Tls(files)
    assert "can be read by every user" in caplog.text
