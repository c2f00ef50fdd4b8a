"""Addresses are checked before anything is bound."""

from __future__ import annotations

import pytest

from service.address import Address, AddressError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:50051", "127.0.0.1", 50051), ("localhost:0", "localhost", 0), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_reads_and_prints_the_same(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text", ["", "50051", ":50051", "localhost", "localhost:", "localhost:x", "h:-1", "h:65536", "::1:80", "h:\u0661"]
)
def test_what_is_no_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(AddressError, match=r"port|HOST:PORT|brackets"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_only_loopback_addresses_are_out_of_reach_of_others(text: str, expected: bool) -> None:
    assert Address.parse(text).is_local is expected


def test_a_chosen_port_replaces_the_asked_one() -> None:
    assert str(Address.parse("[::1]:0").bound(7)) == "[::1]:7"
