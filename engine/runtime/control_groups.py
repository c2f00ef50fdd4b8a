"""Reads the limits that a container puts on its processes, from control groups of either version. Bytes and cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# "No limit" of version 1 is the largest multiple of a page; no machine has this much.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    """The groups of this process. `mount` is where the hierarchy is mounted, `membership` what the kernel lists."""

    mount: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def memory_headroom_bytes(self) -> int | None:
        """Bytes that may still be allocated under the tightest limit; None without one."""
        return self._headroom_bytes(("inactive_file",))

    def memory_left_bytes(self) -> int | None:
        """Bytes until the tightest limit is enforced, which takes pages of files that are in use first; or None."""
        return self._headroom_bytes(("inactive_file", "active_file"))

    def cpu_quota(self) -> float | None:
        """Cores' worth of time that the tightest quota grants; None without one."""
        unified = [_unified_quota(folder) for folder in self._folders("")]
        legacy = [_legacy_quota(folder) for folder in self._folders("cpu")]
        return min((cores for cores in unified + legacy if cores is not None), default=None)

    def _headroom_bytes(self, given_back: Sequence[str]) -> int | None:
        """What the tightest limit leaves, with the lines of `memory.stat` that count as not used; None without one."""
        unified = [_unified_headroom(folder, given_back) for folder in self._folders("")]
        legacy = [_legacy_headroom(folder, given_back) for folder in self._folders("memory")]
        return min((size for size in unified + legacy if size is not None), default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and its parents up to the mount; `controller` "" is the unified hierarchy."""
        for line in _text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                root = self.mount / controllers if controllers else self.mount
                # Inside a container the path may be the host's; only what is mounted here counts.
                relative = Path(path.lstrip("/"))
                yield from (root / part for part in (relative, *relative.parents) if (root / part).is_dir())


def _unified_headroom(folder: Path, given_back: Sequence[str]) -> int | None:
    limit = _number(_text(folder / "memory.max"))
    used = _number(_text(folder / "memory.current"))
    if limit is None or used is None:
        return None
    return limit - used + sum(_statistic(folder, name) for name in given_back)


def _legacy_headroom(folder: Path, given_back: Sequence[str]) -> int | None:
    limit = _number(_text(folder / "memory.limit_in_bytes"))
    used = _number(_text(folder / "memory.usage_in_bytes"))
    if limit is None or used is None or limit >= _UNLIMITED_BYTES:
        return None
    return limit - used + sum(_statistic(folder, f"total_{name}") for name in given_back)


def _unified_quota(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return _ratio(_number(quota), _number(period))


def _legacy_quota(folder: Path) -> float | None:
    return _ratio(_number(_text(folder / "cpu.cfs_quota_us")), _number(_text(folder / "cpu.cfs_period_us")))


def _ratio(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period else None


def _statistic(folder: Path, name: str) -> int:
    """A line of `memory.stat`; file pages that nobody uses are given back before a limit is enforced."""
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _number(text: str) -> int | None:
    """A non-negative number; None for "max", -1 and whatever else means no limit."""
    stripped = text.strip()
    return int(stripped) if stripped.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
