"""Serves metrics over HTTP on a port of their own, from threads: a scrape never waits for the loop, nor it for one.

Whoever connects badly, or says nothing, has a thread for a while, and writes nothing into the log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from service.address import Address, BindError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 10.0
"""How long a connection may neither say nor take anything."""
MOST_CONNECTIONS: Final = 64
"""Connections at the same time; those beyond are closed unheard."""


class MetricsServer:
    """One listening thread, and one for each connection; `close` ends the former."""

    def __init__(
        self, registry: CollectorRegistry, address: Address, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Serve `registry` at `address`.

        Raises:
            BindError: the address cannot be listened on.
        """
        address.require_bindable()
        try:
            self._server = _Server(address, patience_seconds)
        except OSError as error:
            raise BindError(f"cannot listen on {address}: {error.strerror}") from None
        self._server.set_app(_logged(make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = address.bound(self._server.server_port)

    def close(self) -> None:
        """Stop listening, at once: by itself the thread looks only twice a second whether it is to end."""
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, as long as there are not too many."""

    daemon_threads = True

    def __init__(self, address: Address, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._seats = threading.BoundedSemaphore(MOST_CONNECTIONS)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind, and ask nobody for the name of the address."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, or close it unheard."""
        if not self._seats.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            return super().process_request(request, client_address)
        except BaseException:
            self._seats.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What that thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._seats.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A connection that was cut, or said nothing for too long; the library would print where that was noticed."""
        logger.debug("a connection to the metrics has failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    """One connection."""

    server: _Server

    def setup(self) -> None:
        """Wait for each part of what is said, and for each part of the answer to be taken, only so long."""
        super().setup()
        self.connection.settimeout(self.server.patience_seconds)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def get_stderr(self) -> io.StringIO:
        """Where the library would print exceptions: see `_logged`."""
        return io.StringIO()


def _logged(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """`app`, whose faults are lines of our log."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception:
            logger.exception("the metrics cannot be told")
            raise

    return answer
