"""Where a server listens, and what that asks for: an address that others can reach needs encryption or consent.

Everything here is checked before the model is loaded, so that a wrong file costs a second and not a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from service.access import Access
from service.address import Address, AddressError, BindError
from service.reading import UnusableFileError
from service.stopping import StartError
from service.tokens import followed_tokens
from service.unix_socket import OWNER_ALONE, PREFIX, UnixAddress

if TYPE_CHECKING:
    from service.settings import ServerSettings
    from service.tls import Tls

ListenAddress: TypeAlias = Address | UnixAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Where callers come in, how the way is protected, and who they may be."""

    address: ListenAddress
    tls: Tls | None
    access: Access


def checked_entrance(settings: ServerSettings) -> Entrance:
    """The entrance that `settings` describe, ready to be opened.

    Raises:
        StartError: the address, a certificate or the tokens cannot be used.
    """
    return Entrance(address=checked_address(settings), tls=checked_tls(settings), access=checked_access(settings))


def parse_listen(text: str, *, unix_mode: int = OWNER_ALONE) -> ListenAddress:
    """Read HOST:PORT or unix:PATH.

    Raises:
        AddressError: the text is something else.
    """
    return UnixAddress.parse(text, mode=unix_mode) if text.startswith(PREFIX) else Address.parse(text)


def checked_address(settings: ServerSettings) -> ListenAddress:
    """The address to listen on, if it may be used and can be bound.

    Raises:
        StartError: it is no address, needs TLS or consent, or cannot be bound.
    """
    address = permitted_address(settings)
    try:
        address.require_bindable()
    except BindError as error:
        raise StartError(str(error)) from None
    return address


def permitted_address(settings: ServerSettings) -> ListenAddress:
    """The address to listen on, if it may be used.

    Raises:
        StartError: it is no address, or needs TLS or consent.
    """
    try:
        address = parse_listen(settings.listen, unix_mode=settings.unix_mode)
    except AddressError as error:
        raise StartError(f"--listen: {error}") from None
    _require_protection(address, settings)
    return address


def checked_metrics_address(settings: ServerSettings) -> Address | None:
    """Where metrics are served; None for nowhere.

    Raises:
        StartError: it is no address.
    """
    if settings.metrics_listen is None:
        return None
    try:
        return Address.parse(settings.metrics_listen)
    except AddressError as error:
        raise StartError(f"--metrics-listen: {error}") from None


def checked_tls(settings: ServerSettings) -> Tls | None:
    """The certificates to serve with; None without TLS.

    Raises:
        StartError: they cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    from service.tls import Tls, TlsFiles  # gRPC comes with it, which takes a while

    files = TlsFiles(certificate=settings.tls_cert, key=settings.tls_key, client_ca=settings.tls_client_ca)
    try:
        return Tls(files)
    except UnusableFileError as error:
        raise StartError(f"--tls-cert, --tls-key, --tls-client-ca: {error}") from None


def checked_access(settings: ServerSettings) -> Access:
    """Who may call.

    Raises:
        StartError: the tokens file cannot be used.
    """
    if settings.tokens_file is None:
        return Access()
    try:
        return Access(followed_tokens(settings.tokens_file))
    except UnusableFileError as error:
        raise StartError(f"--tokens-file: {error}") from None


def _require_protection(address: ListenAddress, settings: ServerSettings) -> None:
    encrypted = settings.tls_cert is not None
    if isinstance(address, UnixAddress) and encrypted:
        raise StartError("--tls-cert: a Unix socket is not encrypted; its permissions say who may connect")
    if not (address.is_local or encrypted or settings.insecure):
        raise StartError(
            f"--listen: {address} can be reached from outside without encryption; give --tls-cert and --tls-key, or "
            "allow it with --insecure"
        )
