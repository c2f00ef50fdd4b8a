"""The generations that have not ended: found by caller and name, and ended together. Used on the loop alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from engine.contracts.errors import DuplicateRequestError

if TYPE_CHECKING:
    from engine.contracts.cancellation import AbortReason
    from engine.contracts.errors import EngineError
    from engine.contracts.load import GenerationStatus
    from engine.execution.generation import Generation


class Roster:
    """Live generations by caller and request id, which is unique among those of one caller."""

    def __init__(self) -> None:
        """Nobody is here."""
        self._live: dict[tuple[str, str], Generation] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many are live."""
        return len(self._live)

    def next_number(self) -> int:
        """A number that is larger than those of all who came before."""
        return next(self._numbers)

    def require_free(self, caller: str, request_id: str) -> None:
        """Refuse a request id that a live generation of `caller` has; "" is no id.

        Raises:
            DuplicateRequestError: it has.
        """
        if request_id and (caller, request_id) in self._live:
            raise DuplicateRequestError(request_id)

    def enter(self, caller: str, generation: Generation) -> None:
        """A generation of `caller` is live."""
        self._live[caller, generation.request_id] = generation

    def leave(self, caller: str, request_id: str) -> None:
        """It has ended; without effect if it never entered."""
        self._live.pop((caller, request_id), None)

    def find(self, caller: str, *, request_id: str = "", generation_id: str = "") -> Generation | None:
        """The live generation of `caller` by its request id or, without one, by its own."""
        if request_id:
            return self._live.get((caller, request_id))
        mine = (one for (owner, _), one in self._live.items() if owner == caller)
        return next((one for one in mine if one.generation_id == generation_id), None)

    def statuses(self) -> list[GenerationStatus]:
        """Where each stands, oldest first."""
        return sorted((one.status() for one in self._live.values()), key=lambda status: status.number)

    def abort(self, reason: AbortReason, *, of_resident: int | None = None) -> int:
        """Abort all, or those of the resident model of this number; returns how many."""
        generations = [one for one in self._live.values() if of_resident in (None, one.resident_number)]
        for generation in generations:
            generation.abort(reason)
        return len(generations)

    def give_up(self, error: EngineError) -> None:
        """End all with `error`, without the engine thread."""
        for generation in list(self._live.values()):
            generation.give_up(error)
