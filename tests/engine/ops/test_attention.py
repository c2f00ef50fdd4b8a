"""Attention against numpy, and packed segments against each row alone."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.graph import PackedSegment
from engine.ops.attention import causal_attention, packed_attention
from engine.state.kv_cache import KvCache

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive(queries, keys, values, window):
    """Loop over heads and positions, in float64."""
    heads, length, _ = queries.shape[1:]
    held = keys.shape[2]
    out = np.zeros_like(queries, dtype=np.float64)
    for head in range(heads):
        kv_head = head * keys.shape[1] // heads
        for query in range(length):
            newest = held - length + query
            oldest = max(0, newest - window + 1) if window else 0
            scores = keys[0, kv_head, oldest : newest + 1].astype(np.float64) @ queries[0, head, query] * SCALE
            weights = np.exp(scores - scores.max())
            out[0, head, query] = weights / weights.sum() @ values[0, kv_head, oldest : newest + 1]
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
@pytest.mark.parametrize(("length", "held"), [(1, 1), (1, 20), (7, 7), (5, 30), (30, 30)])
def test_causal_attention_equals_the_naive_loop(length, held, window):
    queries, keys = random(1, 1, HEADS, length, DIM), random(2, 1, KV_HEADS, held, DIM)
    values = random(3, 1, KV_HEADS, held, DIM)
    found = causal_attention(mx.array(queries), mx.array(keys), mx.array(values), scale=SCALE, window=window)
    np.testing.assert_allclose(np.array(found), naive(queries, keys, values, window), atol=2e-6)


def test_packed_segments_equal_each_row_alone_bit_for_bit():
    lengths = [1, 6, 1, 3]
    total = sum(lengths)
    queries, keys, values = (
        mx.array(random(seed, total, heads, 1, DIM)) for seed, heads in ((4, HEADS), (5, KV_HEADS), (6, KV_HEADS))
    )
    segments = [PackedSegment(length, [KvCache()]) for length in lengths]
    packed = packed_attention(queries, keys, values, segments, layer=0, scale=SCALE)
    assert packed.shape == (1, total, HEADS * DIM)
    start = 0
    for length in lengths:
        stop = start + length
        alone = packed_attention(
            queries[start:stop],
            keys[start:stop],
            values[start:stop],
            [PackedSegment(length, [KvCache()])],
            layer=0,
            scale=SCALE,
        )
        assert mx.array_equal(packed[:, start:stop], alone).item()
        start = stop
