"""Calls in progress, counted in all and by caller, with a bound on both. Used on the loop alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from service.callers import Caller
    from service.limits import RequestLimits

RETRY_SECONDS: Final = 1.0


class Streams:
    """The calls of one server."""

    def __init__(self, limits: RequestLimits) -> None:
        """Nothing is in progress."""
        self._limits = limits
        self._by_caller: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Calls in progress."""
        return self._by_caller.total()

    def require_room(self, caller: Caller) -> None:
        """Refuse a call that would be one too many.

        Raises:
            OverloadedError: with the bound, and when to come back.
        """
        self._require("concurrent calls", self._limits.max_streams, self.count)
        limit = self._limits.streams_of(caller)
        if limit < self._limits.max_streams:
            self._require("concurrent calls of this caller", limit, self._by_caller[caller.name])

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Around one call.

        Raises:
            OverloadedError: it would be one too many.
        """
        self.require_room(caller)
        self._by_caller[caller.name] += 1
        try:
            yield
        finally:
            self._by_caller[caller.name] -= 1
            if not self._by_caller[caller.name]:
                del self._by_caller[caller.name]

    def _require(self, resource: str, limit: int, used: int) -> None:
        if used >= limit:
            raise OverloadedError(resource, limit=limit, used=used, retry_after_seconds=RETRY_SECONDS)
