"""Where to listen: HOST:PORT, checked before anything is bound."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_PORT = 65535


class AddressError(ValueError):
    """The text is no HOST:PORT; the message says why."""


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
            raise AddressError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:50051")
        if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
            raise AddressError(f"{text!r} has no port from 0 to {MAX_PORT}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise AddressError(f"{text!r} needs brackets around its IPv6 host, such as [::1]:50051")
        return cls(host=host, port=int(port))

    def with_port(self, port: int) -> Address:
        """The same host at another port."""
        return Address(host=self.host, port=port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. Of names, "localhost" alone is trusted to mean that."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        """HOST:PORT, as it can be typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
