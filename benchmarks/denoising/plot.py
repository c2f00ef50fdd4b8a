"""A plain SVG: passes a second of both sides, for each sampler and number of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 640, 190, 80, 56, 16, 12
COLOURS = {"mlx-stream": "#0b6e4f", "mlx-vlm": "#c1440e"}


def plot_of(records: Sequence[dict[str, Any]]) -> str:
    """The drawing of records with `sampler`, `streams`, `side` and `passes_per_second`."""
    groups = list(dict.fromkeys((one["sampler"], one["streams"]) for one in records))
    most = max(one["passes_per_second"] for one in records)
    height = TOP + len(groups) * (2 * BAR + GAP) + 10
    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Denoising passes a second, higher is better</text>',
    ]
    for index, (side, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * index
        parts.append(f'<rect x="{x}" y="32" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="41">{side}</text>')
    for place, group in enumerate(groups):
        top = TOP + place * (2 * BAR + GAP)
        streams = "1 stream" if group[1] == 1 else f"{group[1]} streams"
        parts.append(f'<text x="{LEFT - 8}" y="{top + BAR + 4}" text-anchor="end">{group[0]}, {streams}</text>')
        for row, side in enumerate(COLOURS):
            (own,) = [one for one in records if (one["sampler"], one["streams"], one["side"]) == (*group, side)]
            length = (WIDTH - LEFT - RIGHT) * own["passes_per_second"] / most
            y = top + row * BAR
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[side]}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 11}">{own["passes_per_second"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
