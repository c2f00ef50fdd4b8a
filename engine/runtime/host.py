"""What this process may use of the machine: memory in bytes, physical cores. Read when asked, never remembered."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from engine.runtime.control_groups import ControlGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine as the kernel describes it."""

    memory_table: Path = Path("/proc/meminfo")
    processors: Path = Path("/sys/devices/system/cpu")
    control_groups: ControlGroups = field(default_factory=ControlGroups)

    def available_memory_bytes(self) -> int:
        """Bytes that can be allocated without swapping, within the container's limit."""
        headroom = self.control_groups.memory_headroom_bytes()
        machine = self._machine_available_bytes()
        return machine if headroom is None else max(0, min(machine, headroom))

    def free_memory_bytes(self) -> int:
        """Bytes that the kernel can still find for this process; where there are none, it ends one.

        More than what can be planned with: pages of files that are in use count as free.
        """
        left = self.control_groups.memory_left_bytes()
        machine = self._machine_available_bytes()
        return machine if left is None else max(0, min(machine, left))

    def usable_cores(self) -> int:
        """Physical cores that this process may run on, within its quota; at least 1."""
        quota = self.control_groups.cpu_quota()
        cores = self._allowed_cores()
        return cores if quota is None else max(1, min(cores, int(quota)))

    def _machine_available_bytes(self) -> int:
        try:
            for line in self.memory_table.read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        # Without that table (macOS) the whole memory is the best answer at hand.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _allowed_cores(self) -> int:
        if sys.platform != "linux":
            return os.cpu_count() or 1
        return len({self._siblings(processor) for processor in os.sched_getaffinity(0)})

    def _siblings(self, processor: int) -> str:
        """The hardware threads of one core, in the kernel's notation; the processor itself where it does not say."""
        try:
            return (self.processors / f"cpu{processor}/topology/thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            return str(processor)
