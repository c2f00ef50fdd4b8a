"""What was measured of the clients, as a table and as a plain SVG of bars."""

from __future__ import annotations

from typing import Any

WIDTH, BAR, LEFT, RIGHT = 720, 18, 170, 120
COLOURS = {"1": "#7a9e9f", "64": "#0b6e4f"}


def table(measured: dict[str, Any]) -> str:
    """Lines for a terminal and for a page. Rates are events per second, additions milliseconds."""
    loads = list(next(iter(measured.values())))
    heads = [f"messages/s, {load} | added p50 / p99 ms, {load}" for load in map(streams, loads)]
    lines = [f"| client | {' | '.join(heads)} |", "|---|" + "--:|" * 2 * len(loads)]
    for language, by_load in measured.items():
        cells = [
            f"{by_load[load]['messages_per_second']:,} | "
            f"{by_load[load]['added_ms_p50']} / {by_load[load]['added_ms_p99']}"
            for load in loads
        ]
        lines.append(f"| {language} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(measured: dict[str, Any]) -> str:
    """Bars of messages per second, by client and load."""
    bars = [
        (f"{language}, {streams(load)}", COLOURS[load], by_load[load]["messages_per_second"])
        for language, by_load in measured.items()
        for load in by_load
    ]
    most, height = max(rate for _, _, rate in bars), 50 + len(bars) * (BAR + 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="22" font-size="14">Messages per second, server and client on one machine</text>',
    ]
    for place, (label, colour, rate) in enumerate(bars):
        y, width = 36 + place * (BAR + 6), (WIDTH - LEFT - RIGHT) * rate / most
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 13}" font-size="12" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 13}" font-size="12">{rate:,}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def streams(load: str) -> str:
    """So many, in words."""
    return "1 stream" if load == "1" else f"{load} streams"
