"""A plain SVG of the load table: end-to-end tokens a second by number of streams, one line per contestant."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from benchmarks.serving.goals import middle
from benchmarks.serving.tables import distinct

if TYPE_CHECKING:
    from benchmarks.serving.goals import Records

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 40, 50
COLOURS = ("#0b6e4f", "#7a9e7e", "#c1440e", "#5b5f97", "#8a8a8a")
GRID_LINES = 5


def plot_of(records: Records) -> str:
    """The drawing; an empty frame where nothing was measured."""
    sizes = distinct(records, "streams")
    lines = {name: _points(records, name, sizes) for name in distinct(records, "contestant")}
    top = _round_up(max((value for points in lines.values() for _, value in points), default=1.0))
    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Tokens per second, end to end, by concurrent streams</text>',
    ]
    for step in range(GRID_LINES + 1):
        value = top * step / GRID_LINES
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for position, size in enumerate(sizes):
        x = _x(position, len(sizes))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{size}</text>')
    parts += _curves(lines, sizes, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curves(lines: dict[str, list[tuple[int, float]]], sizes: list[int], top: float) -> list[str]:
    parts = []
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_x(sizes.index(size), len(sizes)), _y(value, top)) for size, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 18 * (number + 1)
        parts.append(f'<rect x="{WIDTH - RIGHT + 20}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y}">{escape(name)}</text>')
    return parts


def _points(records: Records, name: str, sizes: list[int]) -> list[tuple[int, float]]:
    points = []
    for size in sizes:
        cell = [record for record in records if (record["contestant"], record["streams"]) == (name, size)]
        value = middle(cell, "end_to_end_tps", lambda _record: True)
        if value is not None:
            points.append((size, value))
    return points


def _round_up(value: float) -> float:
    step = 10.0 if value <= 100 else 50.0
    return step * -(-value // step)


def _x(position: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (position + 0.5) / max(count, 1)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
