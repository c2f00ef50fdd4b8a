"""When memory has run out: at once where no request fits, after a while where next to none is left, not by turns."""

from __future__ import annotations

import pytest

from engine.contracts.memory import MemoryReading
from service.readiness import AMPLE_SECONDS, LOW_BYTES, LOW_SECONDS, MemoryWatch

PLENTY = 64 * LOW_BYTES
LIMIT = 1_000_000


def reading(
    *, free: int = PLENTY, smallest: int = 1000, limit: int = LIMIT, active: int = 0, device: int | None = None
):
    return MemoryReading(
        smallest_request_bytes=smallest,
        state_limit_bytes=limit,
        free_bytes=free,
        active_bytes=active,
        active_limit_bytes=device,
    )


class Watched:
    """A watch that is asked twice a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = MemoryWatch(lambda: self.now)

    def sees(self, one: MemoryReading | None, seconds: float = 0.5) -> list[bool]:
        """What is told while memory is so for a time, at each look."""
        told = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            told.append(self.watch.is_short(one))
        return told


LOW = {
    "the machine": reading(free=LOW_BYTES - 1),
    "the smallest request": reading(free=2 * LOW_BYTES - 1, smallest=2 * LOW_BYTES, limit=4 * LOW_BYTES),
    "the device": reading(active=1001, device=1000),
}
AMPLE = {
    "the machine": reading(free=2 * LOW_BYTES),
    "the smallest request": reading(free=4 * LOW_BYTES, smallest=2 * LOW_BYTES, limit=4 * LOW_BYTES),
    "the device": reading(active=950, device=1000),
}
BETWEEN = {
    "the machine": reading(free=2 * LOW_BYTES - 1),
    "the smallest request": reading(free=4 * LOW_BYTES - 1, smallest=2 * LOW_BYTES, limit=4 * LOW_BYTES),
    "the device": reading(active=951, device=1000),
}
KINDS = pytest.mark.parametrize("kind", sorted(LOW))


def test_with_plenty_there_is_enough() -> None:
    assert not any(Watched().sees(reading(), 60))


@KINDS
def test_want_is_told_once_it_has_lasted(kind: str) -> None:
    watched = Watched()
    watched.sees(AMPLE[kind], 10)
    told = watched.sees(LOW[kind], LOW_SECONDS + 1)
    assert told.index(True) == round(LOW_SECONDS / 0.5) - 1
    assert all(told[told.index(True) :])


@KINDS
def test_a_moment_of_want_is_passed_over(kind: str) -> None:
    watched = Watched()
    for _ in range(20):
        assert not any(watched.sees(LOW[kind], LOW_SECONDS - 0.5))
        assert not any(watched.sees(BETWEEN[kind]))


@KINDS
def test_it_ends_only_when_there_has_been_plenty_for_long(kind: str) -> None:
    watched = Watched()
    watched.sees(LOW[kind], LOW_SECONDS + 1)
    assert all(watched.sees(BETWEEN[kind], 10 * AMPLE_SECONDS))
    assert all(watched.sees(AMPLE[kind], AMPLE_SECONDS - 1))
    assert all(watched.sees(BETWEEN[kind]))
    told = watched.sees(AMPLE[kind], 2 * AMPLE_SECONDS)
    assert told.index(False) == round(AMPLE_SECONDS / 0.5) - 1
    assert not any(told[told.index(False) :])


def test_readings_that_swing_around_the_threshold_change_nothing() -> None:
    watched = Watched()
    for _ in range(200):
        assert not any(watched.sees(LOW["the machine"]))
        assert not any(watched.sees(AMPLE["the machine"]))
    watched.sees(LOW["the machine"], LOW_SECONDS + 1)
    for _ in range(200):
        assert all(watched.sees(AMPLE["the machine"]))
        assert all(watched.sees(LOW["the machine"]))


def test_where_no_request_fits_it_is_told_at_once_and_its_end_too() -> None:
    watched = Watched()
    assert watched.sees(reading(smallest=LIMIT + 1)) == [True]
    assert watched.sees(reading(smallest=LIMIT)) == [False]


def test_without_a_model_there_is_nothing_to_want() -> None:
    assert not any(Watched().sees(None, 60))
