"""The scope around work on a graph: wired memory, which the engine holds from first work to idle, not per row.

It restores what it changed on every exit. Which adapters apply is a fact of each row's part of a step.
Source: reference, autoregressive §8; denoising-and-models §7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WIRED_SHARE = 0.5
"""Wire a model that holds more than this share of the device's recommended working set."""


def needs_wired_limit(
    *, weights_bytes: int, planned_expert_bytes: int, working_set_bytes: int, forced: bool = False
) -> bool:
    """Whether the weights are large enough, against the device's working set, to be worth wiring."""
    if working_set_bytes <= 0:
        return False
    return forced or max(weights_bytes, planned_expert_bytes) > WIRED_SHARE * working_set_bytes


class WiredScope:
    """Raises the device's wired limit while entered; nests, and restores the limit when the outermost ends."""

    def __init__(self, *, limit_bytes: int, set_limit: Callable[[int], int], synchronize: Callable[[], None]) -> None:
        """`set_limit` (for instance `mx.set_wired_limit`) returns the previous limit; 0 bytes makes this a no-op."""
        self._limit_bytes = limit_bytes
        self._set_limit = set_limit
        self._synchronize = synchronize
        self._depth = 0
        self._previous = 0

    def __enter__(self) -> WiredScope:
        """Raise the limit at the outermost entry."""
        if self._depth == 0 and self._limit_bytes:
            self._previous = self._set_limit(self._limit_bytes)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for pending work, then restore the limit, at the outermost exit."""
        self._depth -= 1
        if self._depth == 0 and self._limit_bytes:
            self._synchronize()
            self._set_limit(self._previous)
