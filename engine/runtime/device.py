"""Chooses the device from the wish and from what is installed. Never imports mlx: the BLAS must come first."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING, Literal, cast

from engine.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Device = Literal["cpu", "metal", "cuda"]

_GPU_DISTRIBUTIONS: dict[str, Device] = {"mlx-metal": "metal", "mlx-cuda-12": "cuda", "mlx-cuda-13": "cuda"}


def offered_devices() -> frozenset[Device]:
    """Devices that the installed mlx was built for; every build has the CPU.

    Raises:
        ConfigurationError: mlx is not installed.
    """
    if importlib.util.find_spec("mlx") is None:
        raise ConfigurationError("device", "mlx is not installed; in the checkout, `make setup` installs it")
    gpus = {device for name, device in _GPU_DISTRIBUTIONS.items() if _is_installed(name)}
    return frozenset({"cpu", *gpus})


def choose_device(
    wish: str | None, *, offered: Collection[Device], driver_present: Callable[[], bool] | None = None
) -> Device:
    """The wished device, or the best of those `offered`: Metal, CUDA where a driver is present, the CPU.

    Raises:
        ConfigurationError: the wish is not offered by the installed mlx.
    """
    if wish is None:
        return _best_of(offered, driver_present or nvidia_driver_present)
    if wish not in offered:
        found = ", ".join(sorted(offered))
        raise ConfigurationError(
            "device", f"the installed mlx offers {found}; in the checkout, `make setup DEVICE={wish}` is for {wish}"
        )
    return cast("Device", wish)


def nvidia_driver_present() -> bool:
    """Whether the driver's library can be opened, as the CUDA build of mlx will."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def blas_matters(device: Device) -> bool:
    """Whether products go through a BLAS that we choose: on Linux CPUs alone (macOS brings Accelerate)."""
    return device == "cpu" and sys.platform == "linux"


def _best_of(offered: Collection[Device], driver_present: Callable[[], bool]) -> Device:
    if "metal" in offered:
        return "metal"
    if "cuda" in offered and driver_present():
        return "cuda"
    return "cpu"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
