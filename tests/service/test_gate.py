"""The gate of a service: whom it lets in by metadata alone, and that each refusal is heard of."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.contracts.errors import EngineError, OverloadedError
from service.access import Access
from service.callers import ANYBODY, Caller, Permission
from service.gate import Gate
from service.limits import RequestLimits
from service.refusals import PermissionDeniedError, UnauthenticatedError
from service.streams import Streams
from service.tokens import TokenTable


@dataclass(frozen=True)
class Call:
    """What gRPC tells of a call before its message is there."""

    method: str = "/service/Generate"
    invocation_metadata: tuple[tuple[str, str], ...] = ()


def nobody_is_known() -> TokenTable:
    return TokenTable(())


def test_every_refusal_is_heard_of_by_its_reason() -> None:
    heard: list[tuple[str, str]] = []

    def hear(method: str, error: EngineError) -> None:
        heard.append((method, error.reason))

    streams = Streams(RequestLimits(max_streams=1))
    known = Gate(access=Access(nobody_is_known), permission=Permission.APPLICATION, refused=hear)
    with pytest.raises(UnauthenticatedError):
        known.require(Call(), "service")
    full = Gate(access=Access(), permission=Permission.APPLICATION, streams=streams, refused=hear)
    full.require(Call(), "service")
    with streams.counted(ANYBODY), pytest.raises(OverloadedError):
        full.require(Call(), "service")
    assert heard == [("service/Generate", "UNAUTHENTICATED"), ("service/Generate", "OVERLOADED")]


def test_a_caller_without_the_permission_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    application = Caller(name="a", permissions=frozenset({Permission.APPLICATION}))
    access = Access()
    monkeypatch.setattr(access, "_by_token", lambda _metadata: application)
    Gate(access=access, permission=Permission.APPLICATION).require(Call(), "service")
    with pytest.raises(PermissionDeniedError):
        Gate(access=access, permission=Permission.ADMIN).require(Call(), "service")


def test_a_service_for_everybody_asks_nothing_and_counts_nobody() -> None:
    streams = Streams(RequestLimits(max_streams=1))
    probes = Gate(access=Access(nobody_is_known), permission=None)
    with streams.counted(ANYBODY):
        probes.require(Call(), "service")


def test_a_caller_who_has_left_is_forgotten() -> None:
    streams = Streams(RequestLimits())
    with streams.counted(Caller(name="a")), streams.counted(Caller(name="b")):
        assert streams.count == 2
    assert streams.count == 0
    assert not streams._by_caller
