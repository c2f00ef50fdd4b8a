"""Softmax, SwiGLU and log-sum-exp for devices on which the library's own exponential is slow.

On CPUs without Accelerate `mx.exp` computes one number at a time with emulated fused multiply-adds; `mx.power` ends in
the C library's `powf` and takes 0.4 times as long. Both round within a few units in the last place.
`Composition.composes_exponentials` chooses. Source: decision 0002.
"""

from __future__ import annotations

import math

import mlx.core as mx

LOG2_E = math.log2(math.e)


def swiglu(gate: mx.array, up: mx.array, *, composed: bool) -> mx.array:
    """`silu(gate) * up` of float arrays with one shape; `composed` avoids the library's exponential.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    if not composed:
        return gate * mx.sigmoid(gate) * up
    # Where the power overflows, the quotient becomes zero, which is the limit.
    return (gate * up) / (1.0 + mx.power(2.0, gate * -LOG2_E))


def soft_cap(x: mx.array, bound: float, *, composed: bool) -> mx.array:
    """`bound · tanh(x / bound)`; `composed` is exact to a few millionths of `bound`, not of small results.

    Source: Gemma 2 report, section 2.
    """
    if not composed:
        return mx.tanh(x / bound) * bound
    # Where the power overflows, the quotient becomes zero, and the result is the bound.
    return bound - (2.0 * bound) / (1.0 + mx.power(2.0, x * (2.0 * LOG2_E / bound)))


def log_sum_exp(x: mx.array, *, composed: bool) -> mx.array:
    """Logarithm of the sum of exponentials over the last axis, which stays with size 1."""
    if not composed:
        return mx.logsumexp(x, axis=-1, keepdims=True)
    top = mx.max(x, axis=-1, keepdims=True)
    return top + mx.log(mx.sum(mx.power(2.0, (x - top) * LOG2_E), axis=-1, keepdims=True))


def attention_of_powers(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    softcap: float = 0.0,
    visible: mx.array | None,
) -> mx.array:
    """Attention whose softmax is made of powers of two; heads that share keys share one product.

    Args:
        queries: [B, H, L, D].
        keys: [B, Hkv, N, D]; H is a multiple of Hkv.
        values: [B, Hkv, N, D].
        scale: factor on the scores, usually D ** -0.5.
        softcap: bound that tanh puts on the scores; 0 means none.
        visible: what is added to the scores, broadcast to [B, 1, 1, L, N]: 0 where a key is seen, else -inf; None
            shows every key to every query. Each query must see one key at least.

    Returns:
        [B, H, L, D].
    """
    batch, heads, length, dim = queries.shape
    kv_heads, held = keys.shape[1], keys.shape[2]
    grouped = (queries * query_factor(scale, softcap)).reshape(batch, kv_heads, -1, dim)
    scores = grouped_scores(grouped, keys, softcap)
    if visible is not None:
        scores = (scores.reshape(batch, kv_heads, -1, length, held) + visible).reshape(scores.shape)
    return mixed_by_powers(scores, values).reshape(batch, heads, length, dim)


def query_factor(scale: float, softcap: float = 0.0) -> float:
    """What queries are multiplied by before `grouped_scores`, so that `mixed_by_powers` gives a softmax."""
    return scale / softcap if softcap else scale * LOG2_E


def grouped_scores(grouped: mx.array, keys: mx.array, softcap: float = 0.0) -> mx.array:
    """Scores [B, Hkv, Q, N], by base 2, of multiplied queries [B, Hkv, Q, D] for `keys` [B, Hkv, N, D]."""
    scores = grouped @ keys.swapaxes(-1, -2)
    return mx.tanh(scores) * (softcap * LOG2_E) if softcap else scores


def mixed_by_powers(scores: mx.array, values: mx.array) -> mx.array:
    """The mean [B, Hkv, Q, D] of `values` [B, Hkv, N, D], weighted by powers of two of `scores` [B, Hkv, Q, N]."""
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    return (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
