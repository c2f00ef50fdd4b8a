"""Who is live: found by caller and name alone, numbered as they came, and ended together."""

from dataclasses import dataclass, field

import pytest

from engine.contracts.errors import DuplicateRequestError, UnavailableError
from engine.contracts.results import AbortReason
from engine.execution.roster import Roster


@dataclass
class Live:
    request_id: str
    generation_id: str = ""
    resident_number: int = 0
    ends: list = field(default_factory=list)

    def abort(self, reason):
        self.ends.append(reason)

    def give_up(self, error):
        self.ends.append(error)


def test_an_id_is_taken_by_its_own_caller_alone_until_its_generation_has_ended():
    roster = Roster()
    roster.enter("a", Live("one"))
    roster.require_free("b", "one")
    with pytest.raises(DuplicateRequestError, match="'one'"):
        roster.require_free("a", "one")
    roster.leave("a", "one")
    roster.leave("a", "one")
    roster.require_free("a", "one")
    assert len(roster) == 0


def test_no_id_is_never_taken():
    roster = Roster()
    roster.enter("a", Live(""))
    roster.require_free("a", "")


def test_a_caller_finds_its_own_by_either_name_and_nobody_elses():
    roster, mine, theirs = Roster(), Live("r", "g-1"), Live("r", "g-2")
    roster.enter("me", mine)
    roster.enter("them", theirs)
    assert roster.find("me", request_id="r") is mine
    assert roster.find("me", generation_id="g-1") is mine
    assert roster.find("me", generation_id="g-2") is None
    assert roster.find("me", request_id="g-1") is None
    assert roster.find("nobody", request_id="r") is None


def test_those_of_one_model_can_be_ended_alone():
    roster, old, new = Roster(), Live("old", resident_number=0), Live("new", resident_number=1)
    for one in (old, new):
        roster.enter("me", one)
    assert roster.abort(AbortReason.REQUESTED, of_resident=0) == 1
    assert (old.ends, new.ends) == ([AbortReason.REQUESTED], [])
    assert roster.abort(AbortReason.SHUTDOWN) == 2
    assert new.ends == [AbortReason.SHUTDOWN]


def test_giving_up_reaches_those_who_leave_while_it_goes_on():
    roster, error = Roster(), UnavailableError("stopped")

    class Leaving(Live):
        def give_up(self, given):
            super().give_up(given)
            roster.leave("me", self.request_id)

    everybody = [Leaving(name) for name in "abc"]
    for one in everybody:
        roster.enter("me", one)
    roster.give_up(error)
    assert [one.ends for one in everybody] == [[error]] * 3
    assert len(roster) == 0


def test_numbers_only_grow():
    roster = Roster()
    numbers = [roster.next_number() for _ in range(3)]
    assert numbers == sorted(set(numbers))
