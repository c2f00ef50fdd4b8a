"""The results as a table, and as a plain SVG of bars."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from benchmarks.prefix.first_token import COLD, EXTENDED, REPEATED
from benchmarks.serving.arena import MLX_LM, OURS

if TYPE_CHECKING:
    from benchmarks.prefix.first_token import Records

KINDS = (COLD, EXTENDED, REPEATED)
GOAL_RATIO = 1 / 20
WIDTH, BAR, LEFT, RIGHT = 720, 22, 250, 110
COLOURS = {OURS: "#0b6e4f", MLX_LM: "#c1440e"}


def seconds_of(records: Records, name: str, kind: str) -> list[float]:
    """Every measurement of one contestant and kind, by round."""
    found = [one for one in records if one["contestant"] == name and one["kind"] == kind]
    return [one["first_token_seconds"] for one in sorted(found, key=lambda one: one["round"])]


def ratio(records: Records, kind: str, *, of: str, to: tuple[str, str]) -> float:
    """The median over rounds of `of`'s time for `kind` by another contestant's and kind's."""
    pairs = zip(seconds_of(records, of, kind), seconds_of(records, *to), strict=True)
    return statistics.median(one / other for one, other in pairs)


def table(document: dict[str, Any]) -> str:
    """Lines for a terminal and for a page."""
    records, bandwidth = document["first_token"], document["bandwidth"]
    lines = ["| prompt of 2,000 tokens | mlx-stream | mlx_lm.server | ours / theirs |", "| --- | --- | --- | --- |"]
    for kind in KINDS:
        ours, theirs = (statistics.median(seconds_of(records, name, kind)) for name in (OURS, MLX_LM))
        lines.append(
            f"| {kind} | {ours:.3f} s | {theirs:.3f} s | {ratio(records, kind, of=OURS, to=(MLX_LM, kind)):.2f} |"
        )
    for kind in (EXTENDED, REPEATED):
        found = {name: ratio(records, kind, of=name, to=(name, COLD)) for name in (OURS, MLX_LM)}
        met = "met" if found[OURS] <= GOAL_RATIO else "missed"
        lines.append(f"| {kind} / cold (goal 1/20: {met}) | 1/{1 / found[OURS]:.0f} | 1/{1 / found[MLX_LM]:.0f} | |")
    size = bandwidth["bytes"]
    lines += ["", f"A state of {bandwidth['tokens']} tokens, {size / 1e6:.0f} MB:", ""]
    for name in ("take", "give", "hand_over", "write", "read"):
        seconds = bandwidth[f"{name}_seconds"]
        lines.append(f"* {name.replace('_', ' ')}: {1000 * seconds:.1f} ms, {size / seconds / 1e9:.1f} GB/s")
    lines.append(f"* look-up among 1,000 entries: {1e6 * bandwidth['look_up_seconds']:.0f} µs")
    return "\n".join(lines)


def plot(records: Records) -> str:
    """Bars of the median time to first token."""
    bars = [(kind, name, statistics.median(seconds_of(records, name, kind))) for kind in KINDS for name in COLOURS]
    longest = max(seconds for _, _, seconds in bars)
    height = 60 + len(bars) * (BAR + 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="22" font-size="14">Seconds to the first token of a 2,000-token prompt</text>',
    ]
    for place, (kind, name, seconds) in enumerate(bars):
        y = 40 + place * (BAR + 8)
        width = max(1.0, (WIDTH - LEFT - RIGHT) * seconds / longest)
        label = f'<text x="{LEFT - 8}" y="{y + 15}" font-size="12" text-anchor="end">'
        parts.append(f"{label}{escape(f'{name}, {kind}')}</text>")
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 15}" font-size="12">{seconds:.3f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
