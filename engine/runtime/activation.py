"""The first uses of mlx on the engine thread: make the device the default, ask for its memory, time a few products.

Imports mlx, so `engine.runtime.prepare` imports this module only when the BLAS is in front.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.runtime.device import Device

# So small that no BLAS splits one over threads, which would measure the neighbours on this machine instead.
_PRODUCT_SIZE = 64
_PRODUCTS = 16
_ROUNDS = 5


def activate(device: Device) -> str:
    """Make `device` this thread's default; returns the device's own name.

    Raises:
        ConfigurationError: mlx cannot see the device after all.
    """
    chosen = _found(device)
    mx.set_default_device(chosen)
    return str(mx.device_info(chosen).get("device_name", device))


def device_memory_bytes(device: Device) -> int | None:
    """What mlx should hold at most on `device`, as the device says; None where the machine's memory is all there is.

    Raises:
        ConfigurationError: mlx cannot see the device.
    """
    if device == "cpu":
        return None
    facts = mx.device_info(_found(device))
    # Metal's working set, CUDA's memory.
    return int(facts.get("max_recommended_working_set_size") or facts.get("total_memory") or 0) or None


def active_memory_bytes() -> int:
    """What mlx holds now. A counter of the allocator: it may be read from any thread."""
    return mx.get_active_memory()


def measure_products() -> float:
    """GFLOP/s of small float32 products on one core: the best of a few rounds, 1 ms in all on an optimized BLAS."""
    factors = mx.ones((_PRODUCTS, _PRODUCT_SIZE, _PRODUCT_SIZE))
    mx.eval(factors, factors @ factors)
    seconds = min(_seconds_of_products(factors) for _ in range(_ROUNDS))
    return 2e-9 * _PRODUCTS * _PRODUCT_SIZE**3 / seconds


def _found(device: Device) -> mx.Device:
    chosen = mx.Device(mx.cpu if device == "cpu" else mx.gpu, 0)
    if not mx.is_available(chosen):
        raise ConfigurationError("device", f"the installed mlx finds no usable {device} device; try device cpu")
    return chosen


def _seconds_of_products(factors: mx.array) -> float:
    products = factors @ factors
    began = time.perf_counter()
    mx.eval(products)
    return time.perf_counter() - began
