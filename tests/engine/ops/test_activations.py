"""Activations against numpy in float64, in the library's form and in the composed one."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.activations import activation, gated
from engine.ops.exponential import soft_cap

POINTS = np.concatenate([np.linspace(-60, 60, 4001), [0.0, -0.0, 1e-30, -1e4, 1e4]]).astype(np.float32)


def wanted(name):
    x = POINTS.astype(np.float64)
    if name == "silu":
        return x / (1 + np.exp(-x.clip(-700)))
    if name == "gelu":
        return x * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x])) / 2
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_an_activation_equals_its_formula(name, composed):
    found = np.array(activation(name, composed=composed)(mx.array(POINTS)))
    np.testing.assert_allclose(found, wanted(name), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_multiplies(name, composed):
    found = np.array(gated(name, composed=composed)(mx.array(POINTS), mx.full(POINTS.shape, 3.0)))
    np.testing.assert_allclose(found, 3 * wanted(name), rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("bound", [2.0, 30.0])
def test_a_soft_cap_bounds(bound, composed):
    found = np.array(soft_cap(mx.array(POINTS), bound, composed=composed))
    np.testing.assert_allclose(found, bound * np.tanh(POINTS.astype(np.float64) / bound), atol=1e-6 * bound)
    assert np.abs(found).max() == bound
