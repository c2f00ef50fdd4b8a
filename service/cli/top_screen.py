"""What `mlx-stream top` shows: from two answers of the server to what rich can draw. Pure: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mlxstream.v1 import admin_pb2
from service.cli.terminal import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

BAR_CELLS: Final = 24
HISTORY_LENGTH: Final = 60
STALE_STEP_SECONDS: Final = 5.0
# Lines that are there however many generations run: title, bars, rates, the table's head, the line below it.
FIXED_LINES: Final = 12
FEWEST_ROWS: Final = 3
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


def gauges(load: admin_pb2.GetLoadResponse) -> Table:
    """What is full, and how full."""
    table = Table.grid(padding=(0, 2))
    for name, used, limit, text in (
        ("rows", load.running, load.max_rows, f"{load.running} of {load.max_rows}"),
        ("queue", load.queued, load.queue_limit, f"{load.queued} of {load.queue_limit}"),
        ("KV memory", load.kv_bytes, load.kv_limit_bytes, _of_bytes(load.kv_bytes, load.kv_limit_bytes)),
        ("prefixes", load.prefix_cache_bytes, load.prefix_cache_limit_bytes,
         _of_bytes(load.prefix_cache_bytes, load.prefix_cache_limit_bytes)),
    ):  # fmt: skip
        share = min(1.0, used / limit) if limit else 0.0
        table.add_row(Text(name, style="dim"), bar(share), Text(f"{share:4.0%}"), Text(text, style="dim"))
    return table


def bar(share: float) -> Text:
    """A bar of which `share` is filled; anything above nothing shows."""
    cells = max(1, round(share * BAR_CELLS)) if share > 0 else 0
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("━" * cells, style), ("─" * (BAR_CELLS - cells), "bright_black"))


def rates(load: admin_pb2.GetLoadResponse, history: History) -> Table:
    """How fast tokens come, now and in the last moments."""
    table = Table.grid(padding=(0, 2))
    for name, rate, past, total in (
        ("writing", load.decode_tps, history.decode_tps, load.generated_tokens),
        ("reading", load.prefill_tps, history.prefill_tps, load.prefilled_tokens),
    ):
        table.add_row(
            Text(name, style="dim"), Text(f"{rate:>9,.1f} tokens/s", style="bold"), Text(sparkline(past), style="cyan"),
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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("generation", "request", "does"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "written", "tokens/s", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in snapshot.generations[:rows]:
        words, style = _PHASES.get(one.phase, ("?", "dim"))
        table.add_row(
            one.generation_id[:8], _request_id(one), Text(words, style=style), _prompt(one),
            f"{one.generated_tokens:,}", _rate(one, earlier.get(one.generation_id), seconds), _age(one, snapshot.now),
        )  # fmt: skip
    left = len(snapshot.generations) - rows
    return Group(table, Text(f"and {left} more", style="dim")) if left > 0 else table


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
