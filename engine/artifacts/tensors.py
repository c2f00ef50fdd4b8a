"""Loaded tensors: dense, or packed with their scales. Plain records; only `weights` and `gguf_blocks` make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

    from engine.artifacts.quantization import QuantizationScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """An array in its stored dtype."""

    weight: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A packed matrix: `weight` [..., out, in·bits/32] uint32, `scales` and `biases` [..., out, in/group_size].

    A value is `scale · q + bias`; `biases` is None for modes without zero points.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def of(
        cls, scheme: QuantizationScheme, weight: mx.array, scales: mx.array, biases: mx.array | None
    ) -> QuantizedTensor:
        """Join the arrays with the scheme that explains them."""
        return cls(
            weight=weight,
            scales=scales,
            biases=biases,
            bits=scheme.bits,
            group_size=scheme.group_size,
            mode=scheme.mode,
        )


StoredTensor = DenseTensor | QuantizedTensor
