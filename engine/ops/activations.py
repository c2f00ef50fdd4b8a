"""Activations of feed-forwards, by the names that families' records use, and in gated form.

`composed` avoids the library's exponential; see `engine.ops.exponential`.
Source: Hendrycks and Gimpel 2016 (GELU); Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.exponential import LOG2_E, swiglu
from engine.ops.host_attention import swiglu_on_host
from engine.ops.streams import in_halves

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.runtime.host_kernels import HostKernels


def gelu(x: mx.array) -> mx.array:
    """x · Φ(x), by the error function."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: mx.array, *, composed: bool) -> mx.array:
    """The approximation of `gelu` by tanh, that is x · sigmoid(2u) with u = √(2/π) (x + 0.044715 x³)."""
    root = math.sqrt(2 / math.pi)
    if composed:  # where the power overflows, the quotient becomes zero, which is the limit
        factor = -2.0 * LOG2_E * root
        return x / (1.0 + mx.power(2.0, x * (x * x * (factor * 0.044715) + factor)))
    return 0.5 * x * (1 + mx.tanh(root * (x + 0.044715 * x**3)))


def activation(name: str, *, composed: bool) -> Callable[[mx.array], mx.array]:
    """The function of one array called `name`."""
    functions: dict[str, Callable[[mx.array], mx.array]] = {
        "gelu": gelu,
        "gelu_tanh": lambda x: gelu_tanh(x, composed=composed),
    }
    return functions[name]


def gated(name: str, *, composed: bool, kernels: HostKernels | None = None) -> Callable[[mx.array, mx.array], mx.array]:
    """The function of gate and up: activation of the gate, times up; by `kernels`, and at once, where they know it."""
    if kernels is not None and name == "silu":
        return partial(swiglu_on_host, kernels)
    whole = _gate(name, composed=composed)
    return in_halves(whole) if composed else whole


def _gate(name: str, *, composed: bool) -> Callable[[mx.array, mx.array], mx.array]:
    if name == "silu":
        return partial(swiglu, composed=composed)
    activated = activation(name, composed=composed)
    return lambda gate, up: activated(gate) * up
