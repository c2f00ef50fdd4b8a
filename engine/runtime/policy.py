"""How weights are held and how wide prefill steps are, by device. Every device-dependent choice of layout is here.

On a CPU float32 is the only fast dtype, and products of quantized weights are many times slower than dense ones; on
Metal and CUDA the stored form is the fast one. Source: decision 0001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.runtime.device import Device

ComputeDtype = Literal["float32", "bfloat16", "float16"]

# A CPU step has a fixed price, so that wide steps cost less a token; measured in decision 0003.
CPU_PREFILL_STEP_TOKENS = 256
CPU_PREFILL_CHUNK_TOKENS = 128
CPU_MIXED_PREFILL_TOKENS = 8
CPU_MIXED_ROW_TOKENS = 4
GPU_PREFILL_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPolicy:
    """How one model is held.

    `compute_dtype` is the dtype of activations, dense weights and quantization scales; `dequantize` turns quantized
    weights into dense ones while they are read; `pretranspose_linear` stores them as the product reads them.
    `prefill_step_tokens` bounds the prompt tokens of one step, `prefill_chunk_tokens` those of one prompt in it, and
    both the time until a cancellation lands. Beside rows that decode each prompt brings `mixed_prefill_tokens`, or each
    such row `mixed_row_tokens`, which delay every stream in the step. `host_kernels`: what stands between products is
    computed by compiled code of the host.
    """

    compute_dtype: ComputeDtype
    dequantize: bool
    pretranspose_linear: bool
    prefill_step_tokens: int = GPU_PREFILL_STEP_TOKENS
    prefill_chunk_tokens: int = GPU_PREFILL_STEP_TOKENS
    mixed_prefill_tokens: int = GPU_PREFILL_STEP_TOKENS
    mixed_row_tokens: int = 0
    host_kernels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFacts:
    """What is known of a model's files before they are read: sizes, and the dtype of the dense tensors."""

    parameters: int
    stored_dtype: ComputeDtype
    quantized: bool


def choose_layout(
    weights: WeightsFacts,
    *,
    device: Device,
    dtype_wish: ComputeDtype | None,
    few_row_products_are_fast: bool,
    available_bytes: int,
    has_host_kernels: bool = False,
) -> LayoutPolicy:
    """The layout for `weights`. `few_row_products_are_fast`: the BLAS needs no transposed copy for single rows.

    `has_host_kernels`: there is compiled code for what stands between products.
    """
    if device != "cpu":
        return LayoutPolicy(
            compute_dtype=dtype_wish or weights.stored_dtype,
            dequantize=False,
            pretranspose_linear=False,
            prefill_step_tokens=GPU_PREFILL_STEP_TOKENS,
            prefill_chunk_tokens=GPU_PREFILL_STEP_TOKENS,
            mixed_prefill_tokens=GPU_PREFILL_STEP_TOKENS,
        )
    dtype = dtype_wish or _cpu_dtype(weights, available_bytes)
    return LayoutPolicy(
        compute_dtype=dtype,
        dequantize=fits(dense_bytes(weights, dtype), available_bytes),
        pretranspose_linear=dtype == "float32" and not few_row_products_are_fast,
        prefill_step_tokens=CPU_PREFILL_STEP_TOKENS,
        prefill_chunk_tokens=CPU_PREFILL_CHUNK_TOKENS,
        mixed_prefill_tokens=CPU_MIXED_PREFILL_TOKENS,
        mixed_row_tokens=CPU_MIXED_ROW_TOKENS,
        host_kernels=has_host_kernels and dtype == "float32",
    )


def dense_bytes(weights: WeightsFacts, dtype: ComputeDtype) -> int:
    """Bytes of all weights when each is dense in `dtype`."""
    return weights.parameters * (4 if dtype == "float32" else 2)


def fits(size_bytes: int, available_bytes: int) -> bool:
    """Whether `size_bytes` leaves a fifth of what is available to caches, activations and everybody else."""
    return size_bytes * 5 <= available_bytes * 4


def _cpu_dtype(weights: WeightsFacts, available_bytes: int) -> ComputeDtype:
    # Quantized weights that stay packed still want float32 around them: 16-bit scales are 8 times slower.
    if weights.quantized or fits(dense_bytes(weights, "float32"), available_bytes):
        return "float32"
    return weights.stored_dtype
