"""The one call that the engine thread makes first: device, BLAS, mlx, memory; and what the rest may ask afterwards.

Importing this module never imports mlx; `prepare_runtime` does, in the one order that works.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from engine.contracts.model import RuntimeInfo
from engine.runtime.blas import BlasReport, confirm_blas, count_products, prepare_blas
from engine.runtime.device import blas_matters, choose_device, offered_devices
from engine.runtime.host import Host
from engine.runtime.host_kernels import HostKernels
from engine.runtime.kernel_directory import keep_kernels_private
from engine.runtime.memory import memory_in_use
from engine.runtime.policy import ComputeDtype, LayoutPolicy, WeightsFacts, choose_layout
from engine.runtime.unpack_kernel import UnpackKernel, open_unpack_kernel

if TYPE_CHECKING:
    from engine.runtime.device import Device
    from engine.runtime.memory import DeviceMemory
    from engine.runtime.settings import RuntimeSettings

__all__ = ["LayoutPolicy", "Runtime", "WeightsFacts", "prepare_runtime"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The prepared machinery. `unpack_kernel` is there where weights are unpacked on the host, if a C compiler is."""

    info: RuntimeInfo
    blas: BlasReport | None
    memory: DeviceMemory
    compute_dtype_wish: ComputeDtype | None
    unpack_kernel: UnpackKernel | None = None

    def layout(self, weights: WeightsFacts) -> LayoutPolicy:
        """How a model of these weights is held here. Ask before any of them is loaded."""
        return choose_layout(
            weights,
            device=self.memory.device,
            dtype_wish=self.compute_dtype_wish,
            few_row_products_are_fast=self.blas is None or self.blas.shim,
            available_bytes=self.memory.available_bytes(),
            has_host_kernels=self.memory.device == "cpu" and HostKernels.of_this_process() is not None,
        )


def prepare_runtime(settings: RuntimeSettings, host: Host | None = None) -> Runtime:
    """Bring mlx up on the right device. Call on the engine thread, before anything imports mlx; again is harmless.

    Raises:
        ConfigurationError: a setting cannot be honoured on this machine.
    """
    host = host or Host()
    device = choose_device(settings.device, offered=offered_devices())
    blas = _blas_in_front(settings, host) if blas_matters(device) else None
    if device != "metal":
        keep_kernels_private(settings.cache_directory / "kernels")

    from engine.runtime import activation  # mlx comes with it, and must come after the BLAS

    device_name = activation.activate(device)
    if blas is not None:
        before = count_products()
        gigaflops = activation.measure_products()
        blas = confirm_blas(blas, counted=count_products() > before, gigaflops=gigaflops)
        _log_blas(blas, gigaflops)
    info = _describe(device, device_name, importlib.metadata.version("mlx"), blas)
    return Runtime(
        info=info,
        blas=blas,
        memory=memory_in_use(device, host),
        compute_dtype_wish=cast("ComputeDtype | None", settings.compute_dtype),
        unpack_kernel=open_unpack_kernel(settings.cache_directory / "unpack") if device == "cpu" else None,
    )


def _blas_in_front(settings: RuntimeSettings, host: Host) -> BlasReport:
    return prepare_blas(
        settings.blas,
        thread_wish=settings.blas_threads,
        usable_cores=host.usable_cores(),
        shim_directory=settings.cache_directory / "blas",
    )


def _describe(device: Device, device_name: str, mlx_version: str, blas: BlasReport | None) -> RuntimeInfo:
    return RuntimeInfo(
        device=device,
        device_name=device_name,
        mlx_version=mlx_version,
        blas=blas.describe() if blas is not None else "",
        blas_optimized=blas is None or blas.optimized,
        remedy=blas.remedy if blas is not None else "",
    )


def _log_blas(blas: BlasReport, gigaflops: float) -> None:
    logger.info("BLAS: %s, %.0f GFLOP/s", blas.describe(), gigaflops)
    if not blas.optimized:
        logger.warning("CPU products are slow (BLAS %s, %.1f GFLOP/s): %s", blas.name, gigaflops, blas.remedy)
