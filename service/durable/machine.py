"""Which start of which machine this is: what was written and not synced has surely survived within one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LINUX_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def running_machine() -> bytes:
    """An id that every start of a machine has for itself; empty on systems that have none to read.

    There, a log that lost whole records together with the power of the machine passes for one that lost nothing.
    """
    try:
        return _LINUX_BOOT_ID.read_bytes().strip()[:64]
    except OSError:
        return b""
