"""Certificates for tests, made by the `openssl` command: authorities, and leaves that they sign."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
LOOPBACK = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Leaf:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """A self-signed authority in a folder of its own."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True)
        authority = cls(folder)
        subject = ("-subj", f"/CN={folder.name}", "-days", "2")
        key = authority.certificate.with_suffix(".key")
        _openssl("req", "-x509", *NEW_KEY, "-keyout", key, "-out", authority.certificate, *subject)
        return authority

    @property
    def certificate(self) -> Path:
        return self.folder / "authority.crt"

    def issue(self, name: str, alternative_names: str = LOOPBACK) -> Leaf:
        """Sign a new key for `name`."""
        leaf = Leaf(certificate=self.folder / f"{name}.crt", key=self.folder / f"{name}.key")
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative_names}\n")
        _openssl("req", *NEW_KEY, "-keyout", leaf.key, "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self.certificate, "-CAkey", self.certificate.with_suffix(".key"), "-CAcreateserial")
        _openssl(
            "x509", "-req", "-in", request, *signer, "-out", leaf.certificate, "-days", "2", "-extfile", extensions
        )
        return leaf

    def client_credentials(self, leaf: Leaf | None = None) -> grpc.ChannelCredentials:
        """What a client needs that trusts this authority, and presents `leaf` if it is given."""
        own = (leaf.key.read_bytes(), leaf.certificate.read_bytes()) if leaf is not None else (None, None)
        return grpc.ssl_channel_credentials(self.certificate.read_bytes(), *own)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
