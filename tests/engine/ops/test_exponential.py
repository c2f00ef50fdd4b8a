"""Composed softmax, SwiGLU and log-sum-exp against float64, at ordinary and at extreme numbers."""

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.exponential import attention_of_powers, log_sum_exp, swiglu

RELATIVE = 3e-6


def random(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(scale)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_swiglu_equals_its_formula(scale, composed):
    gate, up = random(1, 7, 33, scale=scale), random(2, 7, 33)
    wide = gate.astype(np.float64)
    found = np.array(swiglu(mx.array(gate), mx.array(up), composed=composed))
    np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)) * up, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("composed", [False, True])
def test_swiglu_of_far_gates_is_zero_below_and_linear_above(composed):
    gates = mx.array([-3e38, -1e4, -200.0, 0.0, 200.0, 1e4])
    assert swiglu(gates, mx.ones(6), composed=composed).tolist() == [0.0, 0.0, 0.0, 0.0, 200.0, 1e4]


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_log_sum_exp_keeps_its_precision_far_from_zero(shift, composed):
    x = random(3, 4, 1000, scale=5.0) + np.float32(shift)
    wide = x.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    wanted = np.log(np.exp(wide - top).sum(axis=-1, keepdims=True)) + top
    found = np.array(log_sum_exp(mx.array(x), composed=composed))
    assert found.shape == (4, 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("composed", [False, True])
def test_log_sum_exp_ignores_removed_tokens(composed):
    x = mx.array([[-mx.inf, 2.0, -mx.inf]])
    assert log_sum_exp(x, composed=composed).item() == 2.0


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_attention_of_powers_equals_the_library_s(scale):
    queries, keys, values = (
        mx.array(random(seed, 2, heads, length, 16, scale=scale if seed == 4 else 1.0))
        for seed, heads, length in ((4, 6, 5), (5, 2, 9), (6, 2, 9))
    )
    visible = mx.where(mx.arange(9) <= mx.arange(4, 9)[:, None], 0.0, -mx.inf)
    found = attention_of_powers(queries, keys, values, scale=0.25, visible=visible)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=scale * RELATIVE)
