"""What an operator may choose about the machinery. None means: choose for me."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from engine.contracts.errors import ConfigurationError
from engine.runtime.device import Device
from engine.runtime.policy import ComputeDtype

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Choices that hold for the whole process.

    `blas` is a path to a shared library, or one of "auto", "none", "scipy-openblas32", "openblas", "mkl"; it plays a
    part on Linux CPUs alone. `cache_directory` keeps what is compiled: the BLAS shim and mlx's CPU kernels.
    """

    cache_directory: Path
    device: str | None = None
    compute_dtype: str | None = None
    blas: str | None = None
    blas_threads: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the machine.

        Raises:
            ConfigurationError: a choice that no machine offers.
        """
        _check_choice("device", self.device, get_args(Device))
        _check_choice("compute_dtype", self.compute_dtype, get_args(ComputeDtype))
        _check_positive("blas_threads", self.blas_threads)


def _check_choice(setting: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigurationError(setting, f"must be one of {', '.join(choices)}, got {value!r}")


def _check_positive(setting: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigurationError(setting, f"must be at least 1, got {value}")
