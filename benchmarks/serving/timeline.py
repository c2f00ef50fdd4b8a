"""What one request looked like from its client, and what a load of them amounts to. Times are monotonic seconds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TOKENS_OF_A_RATE = 8


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One request: when it was sent, and when how many tokens came."""

    sent_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_seconds(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0][0] - self.sent_at

    def gaps(self, begin: float = float("-inf"), end: float = float("inf")) -> list[float]:
        """Pauses between arrivals that overlap [begin, end]."""
        times = [time for time, _ in self.arrivals]
        return [later - time for time, later in pairwise(times) if later > begin and time < end]

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Timeline:
        """Read what a worker process wrote."""
        return cls(sent_at=message["sent_at"], arrivals=[(time, count) for time, count in message["arrivals"]])

    def to_message(self) -> dict[str, Any]:
        """Write it for another process."""
        return {"sent_at": self.sent_at, "arrivals": self.arrivals}


def summarize_load(timelines: Sequence[Timeline]) -> dict[str, float | None]:
    """End-to-end rate, rate while all streams decode, and time to first token of requests that were sent together."""
    tokens = sum(timeline.tokens for timeline in timelines)
    began = min(timeline.sent_at for timeline in timelines)
    ended = max(timeline.arrivals[-1][0] for timeline in timelines)
    first_token = sorted(timeline.first_token_seconds for timeline in timelines)
    return {
        "tokens": tokens,
        "end_to_end_tps": tokens / (ended - began),
        "decode_tps": decode_rate(timelines),
        "first_token_seconds": statistics.median(first_token),
        "first_token_p95_seconds": percentile(first_token, 95),
        "gap_seconds": median([gap for timeline in timelines for gap in timeline.gaps()]),
    }


def decode_rate(timelines: Sequence[Timeline]) -> float | None:
    """Tokens a second from the last stream's first token to the first stream's last; None if that is too short."""
    begin = max(timeline.arrivals[0][0] for timeline in timelines)
    end = min(timeline.arrivals[-1][0] for timeline in timelines)
    if end <= begin:
        return None
    tokens = sum(count for timeline in timelines for time, count in timeline.arrivals if begin < time <= end)
    return tokens / (end - begin) if tokens >= MIN_TOKENS_OF_A_RATE * len(timelines) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float | None]) -> float | None:
    """The median of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
