"""What was set as a goal, and what the run says about it: ratios between measurements of the same round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import IN_PROCESS, LENT, MLX_LM, OURS, SMG, STREAM_GENERATE
from benchmarks.serving.cancelling import SCENES
from benchmarks.serving.loads import STOCK
from benchmarks.serving.timeline import median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Records = list[dict[str, Any]]
Results = dict[str, Records]

MOST_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One line of the table: met when `value` is at least, or at most, `bound`. Without a bound it only informs."""

    name: str
    value: float | None
    bound: float | None = None
    at_most: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """None where nothing was measured, or nothing was set."""
        if self.value is None or self.bound is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def measured(self) -> str:
        """The value, in two digits behind the point, or as many as tell it from a bound that it is not."""
        if self.value is None:
            return "-"
        shown = (f"{self.value:.{digits}f}" for digits in range(2, MOST_DIGITS))
        return next((text for text in shown if self.value == self.bound or float(text) != self.bound), str(self.value))

    @property
    def wanted(self) -> str:
        """The bound, as it is read."""
        return "" if self.bound is None else f"{'≤' if self.at_most else '≥'} {self.bound:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """One word."""
        return {None: "" if self.value is not None else "not measured", True: "met", False: "missed"}[self.met]


def goals_of(results: Results) -> list[Goal]:
    """Every goal, measured or not, in the order in which they were set."""
    transport, single, load, lent, stock = (
        results.get(name, []) for name in ("transport", "single", "load", "lent", "stock")
    )
    rate, first = "end_to_end_tps", "first_token_seconds"
    single_plain = paired(single, rate, OURS, STREAM_GENERATE)
    single_lent = paired(single, rate, OURS, f"{STREAM_GENERATE}, {LENT}")
    return [
        Goal(name="gRPC against in process, 1 stream", value=paired(transport, rate, OURS, IN_PROCESS, 1), bound=0.98),
        Goal(
            name="gRPC against in process, 16 streams", value=paired(transport, rate, OURS, IN_PROCESS, 16), bound=0.95
        ),
        Goal(name="one stream over gRPC against stream_generate", value=single_plain, bound=1.4),
        Goal(name="the same, it with our shim", value=single_lent),
        Goal(name="16 streams against mlx_lm.server", value=paired(load, rate, OURS, MLX_LM, 16), bound=1.5),
        Goal(name="the same, it with our shim", value=paired(lent, rate, OURS, f"{MLX_LM}, {LENT}", 16)),
        Goal(name="16 streams against the smg MLX servicer", value=paired(load, rate, OURS, SMG, 16)),
        Goal(name="against mlx_lm.server's stock Linux install", value=paired(stock, rate, OURS, STOCK), bound=8),
        Goal(
            name="time to first token against mlx_lm.server, 16 streams",
            value=paired(load, first, OURS, MLX_LM, 16),
            bound=0.5,
            at_most=True,
        ),
        Goal(
            name="longest gap while a prompt loads, in median gaps before it",
            value=gap_ratio(results, "median_gap_seconds"),
            bound=3,
            at_most=True,
        ),
        Goal(name="the same, in median gaps while it loads", value=gap_ratio(results, "loading_median_gap_seconds")),
        *cancel_goals(results),
        Goal(
            name="start to ready against mlx_lm.server's first answer",
            value=start_ratio(results),
            bound=0.5,
            at_most=True,
        ),
    ]


def paired(records: Records, field: str, ours: str, peer: str, streams: int | None = None) -> float | None:
    """Median over rounds of ours by the peer's of the same round."""
    chosen = [record for record in records if streams is None or record["streams"] == streams]
    peers = {record["round"]: record[field] for record in chosen if record["contestant"] == peer}
    return median(
        [
            record[field] / peers[record["round"]]
            for record in chosen
            if record["contestant"] == ours and peers.get(record["round"]) and record[field]
        ]
    )


def gap_ratio(results: Results, by: str) -> float | None:
    """Longest gap while the prompt loads, by a median gap of the same stream."""
    ours = [record for record in results.get("gaps", []) if record["contestant"] == OURS]
    return median([record["loading_longest_gap_seconds"] / record[by] for record in ours])


def cancel_goals(results: Results) -> list[Goal]:
    """From signal to free row, at the 99th percentile, in steps (or chunks) of the same moment."""
    records = {record["scene"]: record for record in results.get("cancel", [])}
    goals = []
    for scene in SCENES:
        record = records.get(scene)
        value = record["signal_to_free_p99_steps"] if record else None
        goals.append(Goal(name=f"cancel to free row, p99, {scene}", value=value, bound=1, at_most=True, unit="steps"))
    return goals


def start_ratio(results: Results) -> float | None:
    """Our start to ready by mlx_lm.server's start to its first answer."""
    records = results.get("start", [])
    ready = middle(records, "ready_seconds", lambda record: record["contestant"] == OURS)
    answer = middle(records, "first_answer_seconds", lambda record: record["contestant"] == MLX_LM)
    return ready / answer if ready and answer else None


def middle(records: Iterable[dict[str, Any]], field: str, chosen: Callable[[dict[str, Any]], bool]) -> float | None:
    """Median of a field over the chosen records."""
    return median([record.get(field) for record in records if chosen(record)])
