"""The metrics' own port: scrapes are answered whatever else connects, and nobody who does writes into the log."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from service import metrics_server
from service.address import Address, BindError
from service.metrics import Metrics
from service.metrics_server import MetricsServer
from tests.service.fake_engine import FakeEngine

HANG_SECONDS = 30.0
SCRAPE = b"GET /metrics HTTP/1.1\r\n\r\n"
NOISE = {
    "nothing": b"",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: ",
    "tls hello": b"\x16\x03\x01" + b"\0" * 200,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version of the future": b"GET /metrics HTTP/9.9\r\n\r\n",
    "a long path": b"GET " + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    "names that are no text": b"GET /metrics?name[]=%ff HTTP/1.1\r\n\r\n",
    "headers that are no text": b"GET /metrics HTTP/1.1\r\nAccept: \xff\xfe\r\n\r\n",
    "a body that never comes": b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    "an address that is none": b"GET http://[::1 HTTP/1.1\r\n\r\n",
    "a whole request": SCRAPE,
}


@contextlib.contextmanager
def serving(registry: CollectorRegistry | None = None, *, patience_seconds: float = 10.0) -> Iterator[Address]:
    local = Address(host="127.0.0.1", port=0)
    server = MetricsServer(registry or Metrics(FakeEngine()).registry, local, patience_seconds=patience_seconds)
    try:
        yield server.address
    finally:
        server.close()


def connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=HANG_SECONDS)


def scraped(address: Address) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG_SECONDS) as answer:
        return str(answer.read().decode())


def heard(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_metrics_have_a_port_of_their_own_and_leave_it_when_they_end() -> None:
    with serving() as address:
        body = scraped(address)
        assert "mlx_stream_num_requests_running 0.0" in body
        assert "process_resident_memory_bytes" in body
        with pytest.raises(BindError, match="in use"):
            MetricsServer(CollectorRegistry(), address)
    MetricsServer(CollectorRegistry(), address).close()


def test_an_address_of_the_newer_kind_is_served_too() -> None:
    try:
        server = MetricsServer(CollectorRegistry(), Address(host="::1", port=0))
    except BindError:
        pytest.skip("this machine has no IPv6")
    assert scraped(server.address) == ""
    server.close()


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "closed"])
def test_who_connects_badly_writes_nothing_and_keeps_nobody_out(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, leave: object
) -> None:
    with serving() as address, caplog.at_level(logging.INFO):
        for noise in NOISE.values():
            connection = connected(address)
            with contextlib.suppress(ConnectionError):
                connection.sendall(noise)
            assert callable(leave)
            leave(connection)
        assert "mlx_stream_num_requests_running" in scraped(address)
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


def test_who_says_nothing_is_let_go() -> None:
    with serving(patience_seconds=0.05) as address:
        silent, halfway = connected(address), connected(address)
        halfway.sendall(NOISE["half a request"])
        assert (heard(silent), heard(halfway)) == (b"", b"")


def test_there_are_only_so_many_connections_and_the_next_one_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MOST_CONNECTIONS", 2)
    with serving(patience_seconds=HANG_SECONDS) as address:
        first, second = connected(address), connected(address)
        assert heard(connected(address)) == b""
        first.sendall(SCRAPE)
        assert b"200 OK" in heard(first)
        second.sendall(SCRAPE)
        assert b"200 OK" in heard(second)


def test_a_fault_of_ours_is_told_once_in_our_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[object]:  # type: ignore[override]
            raise KeyError("a secret")

        def describe(self) -> list[object]:
            return []

    registry = CollectorRegistry()
    registry.register(Broken())
    with serving(registry) as address, connected(address) as connection:
        connection.sendall(SCRAPE)
        assert b"500" in heard(connection).splitlines()[0]
    assert [record.message for record in caplog.records] == ["the metrics cannot be told"]
    assert capfd.readouterr() == ("", "")
