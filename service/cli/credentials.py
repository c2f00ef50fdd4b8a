"""Whom a command trusts and who it is, from the files that its flags name. Mistakes are told with the flag and file."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import click

from mlxstream import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Whom to trust, and who to be."""

    tls: Tls | None = None
    token: str | None = None


def chosen_tls(ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, encrypted: bool) -> Tls | None:
    """What the files hold, once the standard library can use them: gRPC would fail later, and in its own words.

    Raises:
        click.UsageError: they hold nothing of use, or do not go together.
    """
    encrypted = encrypted or ca_file is not None
    if (cert_file is None) != (key_file is None) or (cert_file is not None and not encrypted):
        raise click.UsageError("--cert and --key come together, and need --ca or --tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except ssl.SSLError:
            raise click.UsageError(f"--ca {ca_file}: holds no PEM certificate") from None
    if cert_file is not None and key_file is not None:
        try:
            context.load_cert_chain(cert_file, key_file, password=lambda: "")  # an encrypted key fails, and asks nobody
        except ssl.SSLError as error:
            why = "do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "hold no certificate and key"
            raise click.UsageError(f"--cert {cert_file} and --key {key_file} {why}") from None
    return Tls.from_files(ca=ca_file, certificate=cert_file, key=key_file) if encrypted else None


def presented_token(token_file: Path | None) -> str | None:
    """The token that the file holds.

    Raises:
        click.UsageError: it holds none.
    """
    if token_file is None:
        return None
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise click.UsageError(f"--token-file {token_file}: a token is made of visible ASCII characters") from None
    if not token:
        raise click.UsageError(f"--token-file {token_file}: is empty")
    return token
