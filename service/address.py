"""Where to listen, on the network: HOST:PORT, checked before anything is bound or loaded."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PORT = 65535


class AddressError(ValueError):
    """The text is no address; the message says why."""


class BindError(Exception):
    """The address cannot be listened on; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host (without brackets) and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST:PORT; an IPv6 host stands in brackets.

        Raises:
            AddressError: the text is something else.
        """
        host, separator, port = text.rpartition(":")
        if not separator or not host:
            raise AddressError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:50051, nor unix:PATH")
        if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
            raise AddressError(f"{text!r} has no port from 0 to {MAX_PORT}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise AddressError(f"{text!r} needs brackets around its IPv6 host, such as [::1]:50051")
        return cls(host=host, port=int(port))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it. Of names, "localhost" alone is trusted to mean that."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        """HOST:PORT, as it can be typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def require_bindable(self) -> None:
        """Try the address: gRPC's own failure names no cause, and it binds what it can of several addresses.

        Raises:
            BindError: it is in use, is not ours, or has no such host.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError):
            raise BindError(f"cannot listen on {self}: no such host") from None
        codes = [_bind_errno(family, socket_address) for family, _, _, _, socket_address in found]
        if errno.EADDRINUSE in codes:
            raise BindError(f"cannot listen on {self}: the port is in use")
        if all(codes):
            raise BindError(f"cannot listen on {self}: {os.strerror(codes[0])}")

    @contextlib.contextmanager
    def binding(self) -> Iterator[str]:
        """Around the call that binds, which is told what to bind: nothing to prepare."""
        yield str(self)

    def bound(self, port: int) -> Address:
        """The same host at the port that was bound."""
        return Address(host=self.host, port=port)

    def release(self) -> None:
        """Nothing is left of a port that was closed."""


def _bind_errno(family: int, socket_address: tuple[object, ...]) -> int:
    """0 if a socket can be bound there, else the error's number."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(socket_address)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0
