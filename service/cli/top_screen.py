"""What `mlx-stream top` shows: from two answers of the server to what rich can draw. Pure: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mlxstream.v1 import admin_pb2
from service.cli.terminal import UNBOUNDED_COLUMNS, harmless

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

BAR_CELLS: Final = 24
HISTORY_LENGTH: Final = 60
STALE_STEP_SECONDS: Final = 5.0
# Lines that are there however many generations run: title, bars, rates, the table's head, the line below it.
FIXED_LINES: Final = 12
FEWEST_ROWS: Final = 3
# Columns of the table of generations, and those that a narrow terminal does without, the first one first.
_LEFT: Final = ("generation", "request", "does")
_RIGHT: Final = ("prompt", "written", "tokens/s", "age")
_DISPENSABLE: Final = ("request", "prompt", "age", "tokens/s")
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PHASES: Final[Mapping[int, tuple[str, str]]] = {
    admin_pb2.GENERATION_PHASE_QUEUED: ("queued", "yellow"),
    admin_pb2.GENERATION_PHASE_PREFILLING: ("reading", "cyan"),
    admin_pb2.GENERATION_PHASE_DECODING: ("writing", "green"),
    admin_pb2.GENERATION_PHASE_DETACHED: ("detached", "magenta"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the server said at one moment; `at` is this side's clock, `now` the time of day, both in seconds."""

    at: float
    now: float
    load: admin_pb2.GetLoadResponse
    generations: Sequence[admin_pb2.GenerationInfo] = ()


@dataclass(slots=True)
class History:
    """The rates of the last moments, oldest first."""

    decode_tps: list[float] = field(default_factory=list)
    prefill_tps: list[float] = field(default_factory=list)

    def add(self, load: admin_pb2.GetLoadResponse) -> None:
        """Remember one more moment."""
        for rates, rate in ((self.decode_tps, load.decode_tps), (self.prefill_tps, load.prefill_tps)):
            rates.append(rate)
            del rates[:-HISTORY_LENGTH]


def screen(
    snapshot: Snapshot, before: Snapshot | None, history: History, *, target: str, height: int
) -> RenderableType:
    """The whole picture, no higher than `height` lines where that is possible."""
    rows = max(FEWEST_ROWS, height - FIXED_LINES)
    return Group(
        title(snapshot.load, target),
        Text(),
        gauges(snapshot.load),
        Text(),
        rates(snapshot.load, history),
        Text(),
        generations(snapshot, before, rows),
    )


def title(load: admin_pb2.GetLoadResponse, target: str) -> Text:
    """Which server this is, and how it is."""
    words, style = state_of(load)
    return Text.assemble(
        ("mlx-stream ", "bold"), (harmless(load.model) or "no model", "bold cyan"), "  ", (words, style),
        ("  at ", "dim"), (harmless(target), "dim"),
    )  # fmt: skip


def state_of(load: admin_pb2.GetLoadResponse) -> tuple[str, str]:
    """The server's state in a word or two, and how it is coloured."""
    step_seconds = load.step_age.seconds + load.step_age.nanos / 1e9
    if load.draining:
        return "draining", "bold yellow"
    if load.not_ready_reason == admin_pb2.NOT_READY_REASON_OUT_OF_MEMORY:
        return "out of memory", "bold red"
    if not load.model:
        return "waiting for a model", "bold yellow"
    if step_seconds > STALE_STEP_SECONDS:
        return f"the step in hand takes {step_seconds:.0f} s", "bold red"
    return ("working", "bold green") if load.running or load.queued else ("idle", "green")


class Fitting:
    """Draws the first of several pictures for which there is room: what is less needed is left out, not cut."""

    def __init__(self, *pictures: RenderableType) -> None:
        """From the widest to the narrowest, which is drawn in any case."""
        self._pictures = pictures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        unbounded = options.update(width=UNBOUNDED_COLUMNS)
        fitting = (
            one for one in self._pictures if console.measure(one, options=unbounded).maximum <= options.max_width
        )
        yield next(fitting, self._pictures[-1])


def gauges(load: admin_pb2.GetLoadResponse) -> RenderableType:
    """What is full, and how full; where there is little room, with shorter bars."""
    return Fitting(*(_gauges(load, cells) for cells in (BAR_CELLS, BAR_CELLS // 2, BAR_CELLS // 4)))


def _gauges(load: admin_pb2.GetLoadResponse, cells: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, used, limit, text in (
        ("rows", load.running, load.max_rows, f"{load.running} of {load.max_rows}"),
        ("queue", load.queued, load.queue_limit, f"{load.queued} of {load.queue_limit}"),
        ("KV memory", load.kv_bytes, load.kv_limit_bytes, _of_bytes(load.kv_bytes, load.kv_limit_bytes)),
        ("prefixes", load.prefix_cache_bytes, load.prefix_cache_limit_bytes,
         _of_bytes(load.prefix_cache_bytes, load.prefix_cache_limit_bytes)),
    ):  # fmt: skip
        share = min(1.0, used / limit) if limit else 0.0
        table.add_row(Text(name, style="dim"), bar(share, cells), Text(f"{share:4.0%}"), Text(text, style="dim"))
    return table


def bar(share: float, cells: int = BAR_CELLS) -> Text:
    """A bar of which `share` is filled; anything above nothing shows."""
    filled = max(1, round(share * cells)) if share > 0 else 0
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("━" * filled, style), ("─" * (cells - filled), "bright_black"))


def rates(load: admin_pb2.GetLoadResponse, history: History) -> RenderableType:
    """How fast tokens come, now and in as many of the last moments as there is room for."""
    return Fitting(*(_rates(load, history, moments) for moments in range(HISTORY_LENGTH, -1, -10)))


def _rates(load: admin_pb2.GetLoadResponse, history: History, moments: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, rate, past, total in (
        ("writing", load.decode_tps, history.decode_tps, load.generated_tokens),
        ("reading", load.prefill_tps, history.prefill_tps, load.prefilled_tokens),
    ):
        recent = sparkline(past[-moments:] if moments else ())
        table.add_row(
            Text(name, style="dim"), Text(f"{rate:>9,.1f} tokens/s", style="bold"), Text(recent, style="cyan"),
            Text(f"{total:,} in all", style="dim"),
        )  # fmt: skip
    return table


def sparkline(values: Sequence[float]) -> str:
    """A line of blocks, as high as values are beside the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(value / top * len(_BLOCKS)))] for value in values)


def generations(snapshot: Snapshot, before: Snapshot | None, rows: int) -> RenderableType:
    """The live generations, oldest first, as many as there is room for."""
    if not snapshot.generations:
        return Text("no generations", style="dim")
    earlier = {} if before is None else {one.generation_id: one for one in before.generations}
    seconds = 0.0 if before is None else snapshot.at - before.at
    columns: dict[str, list[RenderableType]] = {name: [] for name in (*_LEFT, *_RIGHT)}
    for one in snapshot.generations[:rows]:
        words, style = _PHASES.get(one.phase, ("?", "dim"))
        cells: tuple[RenderableType, ...] = (
            one.generation_id[:8], _request_id(one), Text(words, style=style), _prompt(one),
            f"{one.generated_tokens:,}", _rate(one, earlier.get(one.generation_id), seconds), _age(one, snapshot.now),
        )  # fmt: skip
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    without = [_DISPENSABLE[:count] for count in range(len(_DISPENSABLE) + 1)]
    table = Fitting(*(_generations(columns, left_out) for left_out in without))
    left = len(snapshot.generations) - rows
    return Group(table, Text(f"and {left} more", style="dim")) if left > 0 else table


def _generations(columns: Mapping[str, Sequence[RenderableType]], left_out: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    kept = [name for name in columns if name not in left_out]
    for name in kept:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for cells in zip(*(columns[name] for name in kept), strict=True):
        table.add_row(*cells)
    return table


def _request_id(one: admin_pb2.GenerationInfo) -> str:
    return "" if one.request_id == one.generation_id else harmless(one.request_id)[:32]


def _prompt(one: admin_pb2.GenerationInfo) -> str:
    if one.phase == admin_pb2.GENERATION_PHASE_PREFILLING:
        return f"{one.prefilled_tokens:,}/{one.prompt_tokens:,}"
    return f"{one.prompt_tokens:,}"


def _rate(one: admin_pb2.GenerationInfo, earlier: admin_pb2.GenerationInfo | None, seconds: float) -> str:
    if earlier is None or seconds <= 0 or one.phase != admin_pb2.GENERATION_PHASE_DECODING:
        return ""
    return f"{(one.generated_tokens - earlier.generated_tokens) / seconds:.1f}"


def _age(one: admin_pb2.GenerationInfo, now: float) -> str:
    seconds = max(0.0, now - one.create_time.seconds - one.create_time.nanos / 1e9)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _of_bytes(used: int, limit: int) -> str:
    return f"{_bytes(used)} of {_bytes(limit)}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
