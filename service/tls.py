"""TLS of the server: certificate, key, and the authority of client certificates. New files serve new connections.

Messages name files without their folders, and hold nothing of what is in them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from service.reading import UnusableFileError, read_small_file, warn_if_exposed
from service.reloading import Reloaded

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must present a certificate that it has signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that are given."""
        return tuple(path for path in (self.certificate, self.key, self.client_ca) if path is not None)


class Tls:
    """Makes server credentials that follow their files."""

    def __init__(self, files: TlsFiles) -> None:
        """Read and check `files`.

        Raises:
            UnusableFileError: they cannot be used.
        """
        self._files = files
        self._served: grpc.ServerCertificateConfiguration | None = None
        self._reloaded = Reloaded(files.paths, self._read, what="TLS certificate")
        warn_if_exposed(files.key)

    @property
    def asks_clients(self) -> bool:
        """Whether clients must present a certificate."""
        return self._files.client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for one port."""
        self._served = self._reloaded.current()
        return grpc.dynamic_ssl_server_credentials(
            self._served,
            self._newer,  # type: ignore[arg-type]  # its None means "as before", which the stubs do not know
            require_client_authentication=self.asks_clients,
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks before each handshake, on a thread of its own: None keeps what it has."""
        current = self._reloaded.current()
        if current is self._served:
            return None
        self._served = current
        return current

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        certificate, key = (read_small_file(path, MAX_FILE_BYTES) for path in (files.certificate, files.key))
        authority = read_small_file(files.client_ca, MAX_FILE_BYTES) if files.client_ca is not None else None
        _require_pair(files)
        if authority is not None and files.client_ca is not None:
            _require_authority(authority, files.client_ca)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)


def _require_pair(files: TlsFiles) -> None:
    """Let the standard library look: gRPC would fail later, and without a reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as error:
        why = "do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "hold no PEM certificate and key"
        raise UnusableFileError(
            f"{files.certificate.name} and {files.key.name} {why} (an encrypted key is not read)"
        ) from None
    except OSError as error:
        raise UnusableFileError(f"{files.certificate.name}, {files.key.name}: {error.strerror}") from None


def _require_authority(authority: bytes, path: Path) -> None:
    # Comments between certificates may be in any language; within one, a replaced byte makes it unusable.
    text = authority.decode("ascii", errors="replace").replace("\ufffd", "?")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):  # a file that is empty is a ValueError
        raise UnusableFileError(f"{path.name} holds no PEM certificates") from None


def _no_password() -> str:
    """An encrypted key fails instead of asking on the terminal."""
    return ""
