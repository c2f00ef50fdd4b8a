"""Watches a server from outside, by its metrics: memory, file descriptors, tasks and rows over time."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? ([-+0-9.eE]+)$", re.M)


@dataclass(frozen=True, slots=True)
class Look:
    """One look; `seconds` since the soak began."""

    seconds: float
    resident_bytes: int
    open_files: int
    loop_tasks: int
    running: int
    waiting: int
    generated_tokens: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def look(metrics_url: str, seconds: float) -> Look:
    """Scrape once."""
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        found = {name: float(value) for name, value in SAMPLE.findall(response.read().decode())}
    return Look(
        seconds=round(seconds, 1),
        resident_bytes=int(found["process_resident_memory_bytes"]),
        open_files=int(found["process_open_fds"]),
        loop_tasks=int(found["mlx_stream_event_loop_tasks"]),
        running=int(found["mlx_stream_num_requests_running"]),
        waiting=int(found["mlx_stream_num_requests_waiting"]),
        generated_tokens=int(found["mlx_stream_generation_tokens_total"]),
    )


def files_by_kind(pid: int) -> dict[str, int]:
    """How many files of each kind a process of Linux has open: sockets, eventfds, files; nothing elsewhere."""
    folder, kinds = Path(f"/proc/{pid}/fd"), Counter[str]()
    for entry in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            anonymous = re.match(r"(?:anon_inode:)?\[?(\w+)", target)
            kinds["file" if target.startswith("/") or anonymous is None else anonymous[1]] += 1
    return dict(kinds)


def slope_per_minute(looks: list[Look]) -> float:
    """Bytes that resident memory gains in a minute, by least squares over the second half."""
    half = looks[len(looks) // 2 :]
    if len(half) < 2:
        return 0.0
    mean_x = sum(one.seconds for one in half) / len(half)
    mean_y = sum(one.resident_bytes for one in half) / len(half)
    spread = sum((one.seconds - mean_x) ** 2 for one in half)
    return 60 * sum((one.seconds - mean_x) * (one.resident_bytes - mean_y) for one in half) / spread if spread else 0.0
