"""How fast the engine works now: rates over the last seconds, from counters that only grow.

`sample` is called at a steady pace by the server's pulse; whoever asks gets the rate up to this moment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.load import EngineLoad

WINDOW_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    generated_tokens: int
    prefilled_tokens: int
    ended: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens, generations that ended, and generations that failed, per second."""

    decode_tps: float = 0.0
    prefill_tps: float = 0.0
    ended_per_second: float = 0.0
    failed_per_second: float = 0.0


class LoadMeter:
    """Remembers the counters of the last seconds."""

    def __init__(self, load: Callable[[], EngineLoad], clock: Callable[[], float]) -> None:
        """Read counters from `load`; `clock` counts seconds."""
        self._load = load
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self._ended = 0
        self._failed = 0

    def count_end(self, *, failed: bool) -> None:
        """A generation has ended."""
        self._ended += 1
        self._failed += failed

    def sample(self) -> None:
        """Remember the counters as they are now."""
        self._read()

    def rates(self) -> Rates:
        """The rates between the oldest sample of the window and now; zeros while there is only one."""
        newest = self._read()
        oldest = self._samples[0]
        seconds = newest.at - oldest.at
        if seconds <= 0:
            return Rates()
        return Rates(
            decode_tps=(newest.generated_tokens - oldest.generated_tokens) / seconds,
            prefill_tps=(newest.prefilled_tokens - oldest.prefilled_tokens) / seconds,
            ended_per_second=(newest.ended - oldest.ended) / seconds,
            failed_per_second=(newest.failed - oldest.failed) / seconds,
        )

    def _read(self) -> _Sample:
        load = self._load()
        newest = _Sample(self._clock(), load.generated_tokens, load.prefilled_tokens, self._ended, self._failed)
        while len(self._samples) > 1 and newest.at - self._samples[0].at > WINDOW_SECONDS:
            self._samples.popleft()
        self._samples.append(newest)
        return newest
