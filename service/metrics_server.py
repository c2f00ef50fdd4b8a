"""Serves metrics over HTTP on a port of their own, from a thread: a scrape never waits for the loop, nor it for one."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from service.address import Address, BindError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MetricsServer:
    """One listening thread; `close` ends it."""

    def __init__(self, registry: CollectorRegistry, address: Address) -> None:
        """Serve `registry` at `address`.

        Raises:
            BindError: the address cannot be listened on.
        """
        address.require_bindable()
        try:
            self._server, self._thread = start_http_server(address.port, address.host, registry)
        except OSError as error:
            raise BindError(f"cannot listen on {address}: {error.strerror}") from None
        self.address = address.bound(self._server.server_port)

    def close(self) -> None:
        """Stop listening, at once: by itself the thread looks only twice a second whether it is to end."""
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)
