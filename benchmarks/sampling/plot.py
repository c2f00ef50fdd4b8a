"""A plain SVG of the shares: one line for each vocabulary and set of options, beside the goals."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 50, 170, 40, 50
COLOURS = ("#0b6e4f", "#c1440e", "#7a9e7e", "#e0a387")


def plot_of(records: Sequence[dict], goals: dict[str, float]) -> str:
    """The drawing of records with `options`, `vocabulary`, `rows` and `share`."""
    rows = sorted({record["rows"] for record in records})
    top = 1.1 * max([record["share"] for record in records] + list(goals.values()))

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top

    def x(count: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (rows.index(count) + 0.5) / len(rows)

    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Choosing tokens, as a share of a decode step, by rows</text>',
    ]
    for name, goal in goals.items():
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(goal):.1f}" y2="{y(goal):.1f}"'
        parts.append(f'<line {ends} stroke="#999" stroke-dasharray="4 4"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(goal) + 4:.1f}" fill="#666">goal {name}: {goal:.0%}</text>')
    parts += [f'<text x="{x(one):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{one}</text>' for one in rows]
    lines = sorted({(record["vocabulary"], record["options"]) for record in records})
    for number, line in enumerate(lines):
        own = [record for record in records if (record["vocabulary"], record["options"]) == line]
        points = [(x(record["rows"]), y(record["share"])) for record in sorted(own, key=lambda one: one["rows"])]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        low = HEIGHT - BOTTOM - 18 * (len(lines) - number)
        parts.append(f'<rect x="{WIDTH - RIGHT + 8}" y="{low - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 26}" y="{low}">{line[1]}, {line[0]:,}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
