"""Certificates for the cases of TLS, made by `openssl` for one run: two authorities, a server's and a client's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

DAYS = "2"
SERVER_NAME = "localhost"


class NoOpensslError(Exception):
    """There is no `openssl` on this machine."""


def make_certificates(folder: Path) -> None:
    """Write `ca.pem`, `other-ca.pem`, and `server`, `client` and `stranger` each as `.pem` and `.key`.

    The stranger is a client whose certificate the other authority has signed.

    Raises:
        NoOpensslError: they cannot be made here.
    """
    if shutil.which("openssl") is None:
        raise NoOpensslError("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    for authority in ("ca", "other-ca"):
        _openssl(folder, "req", "-x509", *_key(authority), "-out", f"{authority}.pem", "-subj", f"/CN={authority}",
                 "-days", DAYS, "-addext", "basicConstraints=critical,CA:TRUE")  # fmt: skip
    _signed(folder, "server", "ca", f"subjectAltName=DNS:{SERVER_NAME},IP:127.0.0.1")
    _signed(folder, "client", "ca", "extendedKeyUsage=clientAuth")
    _signed(folder, "stranger", "other-ca", "extendedKeyUsage=clientAuth")


def _key(name: str) -> tuple[str, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"


def _signed(folder: Path, name: str, authority: str, extension: str) -> None:
    _openssl(folder, "req", *_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"{extension}\n", encoding="utf-8")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
             "-CAcreateserial", "-out", f"{name}.pem", "-days", DAYS, "-extfile", f"{name}.ext")  # fmt: skip


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
