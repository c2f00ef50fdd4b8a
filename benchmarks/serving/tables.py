"""The results as tables, once for the terminal and for Markdown: every cell is a median over rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.serving.goals import goals_of, middle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.serving.goals import Records, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, a line on how to read it, and cells."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(results: Results) -> list[Table]:
    """All tables that the results can fill."""
    tables = [
        goal_table(results),
        load_table(results, "load", "Load: 100-token prompts, 32 new tokens, greedy"),
        load_table(results, "decode", "Decoding: 8-token prompts, 48 new tokens, greedy"),
        load_table(results, "transport", "gRPC and the engine in process, back to back"),
        load_table(results, "single", "One stream"),
        load_table(results, "lent", "mlx_lm.server with our shim in front of its OpenBLAS"),
        load_table(results, "stock", "The stock Linux install of mlx_lm.server"),
        gap_table(results),
        cancel_table(results),
        leaving_table(results),
        delivery_table(results),
        start_table(results),
    ]
    return [table for table in tables if table.rows]


def goal_table(results: Results) -> Table:
    """The goals first: they are why the rest was measured."""
    rows = [(goal.name, goal.measured, goal.wanted, goal.verdict) for goal in goals_of(results)]
    note = "Ours by the peer's, the median over rounds of the ratio within a round."
    return Table(title="Goals", note=note, head=("", "measured", "goal", ""), rows=tuple(rows))


def load_table(results: Results, name: str, title: str) -> Table:
    """Rates and time to first token by number of streams and contestant."""
    records = results.get(name, [])
    rows = []
    for streams in distinct(records, "streams"):
        for contestant in distinct(records, "contestant"):
            cell = [record for record in records if (record["streams"], record["contestant"]) == (streams, contestant)]
            if cell:
                rows.append((str(streams), contestant, *_load_cells(cell), str(len(cell))))
    head = (
        "streams",
        "",
        "tok/s end to end",
        "tok/s all decoding",
        "first token s",
        "p95 s",
        "gap ms",
        "tok per CPU s",
        "rounds",
    )
    note = "With many streams the first may end before the last begins: no rate while all decode."
    return Table(title=title, note=note if name == "load" else "", head=head, rows=tuple(rows))


def gap_table(results: Results) -> Table:
    """A running stream beside a loading prompt."""
    records = results.get("gaps", [])
    fields = ("median_gap_seconds", "loading_median_gap_seconds", "loading_longest_gap_seconds")
    rows = [
        (
            name,
            *(_milliseconds(_of(records, field, contestant=name)) for field in fields),
            _number(_of(records, "load_seconds", contestant=name), 1),
        )
        for name in distinct(records, "contestant")
    ]
    head = ("", "median gap alone ms", "median while loading ms", "longest while loading ms", "prompt loaded in s")
    return Table(title="One stream while a 1,000-token prompt loads", note="", head=head, rows=tuple(rows))


def cancel_table(results: Results) -> Table:
    """From a client's cancel to the free row."""
    records = results.get("cancel", [])
    rows = [
        (
            record["scene"],
            str(record["cancels"]),
            *(
                f"{_milliseconds(record[f'{part}_p50_seconds'])} / {_milliseconds(record[f'{part}_p99_seconds'])}"
                for part in ("client_to_signal", "signal_to_free", "client_to_free", "step")
            ),
        )
        for record in records
    ]
    head = ("", "cancels", "client to signal", "signal to free row", "client to free row", "one step or chunk")
    note = "p50 / p99 in milliseconds; the step or chunk is the one in hand when the signal was raised."
    return Table(title="Cancel", note=note, head=head, rows=tuple(rows))


def leaving_table(results: Results) -> Table:
    """What a server computes for a client that has left."""
    records = results.get("leaving", [])
    rows = [
        (
            scene,
            name,
            _number(_of(records, "cpu_seconds", contestant=name, scene=scene), 2),
            _number(_of(records, "busy_seconds", contestant=name, scene=scene), 2),
        )
        for scene in distinct(records, "scene")
        for name in distinct(records, "contestant")
    ]
    head = ("the client left while", "", "processor s spent after", "idle after s")
    return Table(title="A client leaves", note="", head=head, rows=tuple(rows))


def delivery_table(results: Results) -> Table:
    """From the end of a step to the client."""
    records = results.get("delivery", [])
    rows = [
        (
            interval,
            *(
                _milliseconds(_of(records, f"delay_{part}_seconds", interval=interval), 2)
                for part in ("p50", "p99", "longest")
            ),
        )
        for interval in distinct(records, "interval")
    ]
    head = ("16 streams", "p50 ms", "p99 ms", "longest ms")
    return Table(title="Delivery: from the end of a step to the client", note="", head=head, rows=tuple(rows))


def start_table(results: Results) -> Table:
    """From the command to the first answer."""
    records = results.get("start", [])
    rows = [
        (
            name,
            _number(_of(records, "ready_seconds", contestant=name), 2),
            _number(_of(records, "first_answer_seconds", contestant=name), 2),
        )
        for name in distinct(records, "contestant")
    ]
    return Table(title="Start, everything cached", note="", head=("", "ready s", "first answer s"), rows=tuple(rows))


def distinct(records: Records, field: str) -> list[Any]:
    """Values of a field, in the order of first mention; numbers sorted."""
    values = list(dict.fromkeys(record[field] for record in records))
    return sorted(values) if all(isinstance(value, int) for value in values) else values


def _load_cells(cell: Records) -> tuple[str, ...]:
    return (
        _number(middle(cell, "end_to_end_tps", _any), 1),
        _number(middle(cell, "decode_tps", _any), 1),
        _number(middle(cell, "first_token_seconds", _any), 2),
        _number(middle(cell, "first_token_p95_seconds", _any), 2),
        _milliseconds(middle(cell, "gap_seconds", _any)),
        _number(middle(cell, "tokens_per_cpu_second", _any), 1),
    )


def _of(records: Iterable[dict[str, Any]], field: str, **wanted: str) -> float | None:
    return middle(records, field, lambda record: all(record.get(name) == value for name, value in wanted.items()))


def _any(_record: dict[str, Any]) -> bool:
    return True


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.{digits}f}"
