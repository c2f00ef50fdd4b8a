"""How much memory there is for a model: one answer for loading, admission, estimates and readiness. Units: bytes.

Only mlx can say what an accelerator has, so it is imported for one, and never for a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runtime.policy import fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.runtime.device import Device
    from engine.runtime.host import Host


def nothing_held() -> int:
    """What mlx holds where it was never imported."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory that models on `device` come from. Questions are answered anew each time they are asked.

    `limit_bytes` is what mlx should hold there at most: Metal's recommended working set, CUDA's memory; None where the
    machine's memory is all there is. `active_bytes` tells what mlx holds in this process, from any thread.
    """

    device: Device
    host: Host
    limit_bytes: int | None = None
    active_bytes: Callable[[], int] = nothing_held

    def available_bytes(self) -> int:
        """Bytes that may still be allocated: the host's, through which all weights come, within the device's own."""
        free_bytes = self.host.available_memory_bytes()
        if self.limit_bytes is None:
            return free_bytes
        return min(free_bytes, max(0, self.limit_bytes - self.active_bytes()))

    def fits(self, size_bytes: int) -> bool:
        """Whether `size_bytes` can be held with room to spare for caches and activations."""
        return fits(size_bytes, self.available_bytes())


def memory_in_use(device: Device, host: Host) -> DeviceMemory:
    """The memory of a device that mlx computes on. Imports mlx, so the runtime comes first.

    Raises:
        ConfigurationError: mlx finds no such device.
    """
    from engine.runtime import activation  # mlx comes with it

    limit_bytes = activation.device_memory_bytes(device)
    return DeviceMemory(device=device, host=host, limit_bytes=limit_bytes, active_bytes=activation.active_memory_bytes)


def memory_before_loading(device: Device, host: Host) -> DeviceMemory:
    """The memory of a device on which nothing was prepared yet.

    Raises:
        ConfigurationError: mlx finds no such device.
    """
    return DeviceMemory(device=device, host=host) if device == "cpu" else memory_in_use(device, host)
