"""Machines that are not there: so much free memory, and devices that say what mlx should hold at most."""

from engine.runtime.memory import DeviceMemory


class FreeMemory:
    """A host with so many bytes to give."""

    def __init__(self, available_bytes):
        self._available_bytes = available_bytes

    def available_memory_bytes(self):
        return self._available_bytes


def machine(available_bytes, *, device="cpu", limit_bytes=None, active_bytes=0):
    """The memory of a device on a host with `available_bytes`."""
    return DeviceMemory(
        device=device,
        host=FreeMemory(available_bytes),
        limit_bytes=limit_bytes,
        active_bytes=lambda: active_bytes,
    )
