"""How weights are held, by device and by what fits."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.policy import LayoutPolicy, WeightsFacts, choose_layout, dense_bytes, fits

ROOMY, TIGHT = 10_000, 1_000
QUANTIZED = WeightsFacts(parameters=1_000, stored_dtype="float16", quantized=True)
DENSE = WeightsFacts(parameters=1_000, stored_dtype="bfloat16", quantized=False)


def layout(weights: WeightsFacts, available_bytes: int = ROOMY, **choices: Any) -> LayoutPolicy:
    defaults: dict[str, Any] = {"device": "cpu", "dtype_wish": None, "few_row_products_are_fast": True}
    return choose_layout(weights, available_bytes=available_bytes, **(defaults | choices))


@pytest.mark.parametrize("weights", [QUANTIZED, DENSE])
def test_a_cpu_holds_everything_in_float32_where_it_fits(weights: WeightsFacts) -> None:
    assert layout(weights) == LayoutPolicy(
        compute_dtype="float32",
        dequantize=True,
        pretranspose_linear=False,
        prefill_step_tokens=256,
        prefill_chunk_tokens=128,
        mixed_prefill_tokens=8,
        mixed_row_tokens=4,
    )


def test_quantized_weights_that_do_not_fit_stay_packed_in_a_float32_model() -> None:
    tight = layout(QUANTIZED, TIGHT)
    assert (tight.compute_dtype, tight.dequantize) == ("float32", False)


def test_dense_weights_that_do_not_fit_keep_their_dtype() -> None:
    assert layout(DENSE, TIGHT).compute_dtype == "bfloat16"


def test_weights_are_transposed_where_single_rows_are_slow() -> None:
    assert layout(DENSE, few_row_products_are_fast=False).pretranspose_linear
    assert not layout(DENSE, TIGHT, few_row_products_are_fast=False).pretranspose_linear, "16-bit products are not BLAS"


def test_compiled_code_serves_a_cpu_in_float32_alone() -> None:
    assert layout(DENSE, has_host_kernels=True).host_kernels
    assert not layout(DENSE).host_kernels
    assert not layout(DENSE, TIGHT, has_host_kernels=True).host_kernels, "it stays in 16 bits"
    assert not layout(DENSE, device="metal", has_host_kernels=True).host_kernels


@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize("weights", [QUANTIZED, DENSE])
def test_a_gpu_keeps_the_stored_form(device: str, weights: WeightsFacts) -> None:
    assert layout(weights, device=device, few_row_products_are_fast=False) == LayoutPolicy(
        compute_dtype=weights.stored_dtype, dequantize=False, pretranspose_linear=False
    )


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_gpu_reads_prompts_in_steps_of_one_width(device: str) -> None:
    wide = layout(DENSE, device=device)
    assert wide.prefill_step_tokens == wide.prefill_chunk_tokens == wide.mixed_prefill_tokens == 2048


@pytest.mark.parametrize("device", ["cpu", "metal", "cuda"])
def test_a_wished_dtype_is_used(device: str) -> None:
    assert layout(DENSE, device=device, dtype_wish="float16").compute_dtype == "float16"


def test_sizes_follow_the_dtype_and_a_fifth_stays_free() -> None:
    assert (dense_bytes(DENSE, "float32"), dense_bytes(DENSE, "bfloat16")) == (4_000, 2_000)
    assert fits(800, 1_000)
    assert not fits(801, 1_000)
