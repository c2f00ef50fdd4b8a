"""Attention against numpy, and packed segments against each row alone."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.graph import PackedSegment
from engine.ops.attention import PackedAttention, causal_attention, mask_with_stretches, masked_attention
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import KvPool

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive(queries, keys, values, window, softcap=0.0):
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
            scores = np.tanh(scores / softcap) * softcap if softcap else scores
            weights = np.exp(scores - scores.max())
            out[0, head, query] = weights / weights.sum() @ values[0, kv_head, oldest : newest + 1]
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(("length", "held"), [(1, 1), (1, 20), (7, 7), (5, 30), (30, 30)])
def test_causal_attention_equals_the_naive_loop(length, held, window, composed):
    queries, keys = random(1, 1, HEADS, length, DIM), random(2, 1, KV_HEADS, held, DIM)
    values = random(3, 1, KV_HEADS, held, DIM)
    parts = (mx.array(part) for part in (queries, keys, values))
    found = causal_attention(*parts, scale=SCALE, window=window, composed=composed)
    np.testing.assert_allclose(np.array(found), naive(queries, keys, values, window), atol=2e-6)


STRETCHES = {"none": [], "one": [(2, 6)], "two, side by side": [(0, 3), (3, 7)], "all": [(0, 7)], "a single": [(6, 7)]}


def sees(query, key, before, window, stretches):
    """Whether the query at a place among the newest sees the key at a place among all held."""
    newest = before + query
    causal = key <= newest and (not window or key > newest - window)
    return causal or any(start <= query < end and start <= key - before < end for start, end in stretches)


@pytest.mark.parametrize("stretches", STRETCHES.values(), ids=STRETCHES)
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("held", [7, 12])
def test_a_mask_shows_what_came_before_and_the_whole_of_a_query_s_own_stretch(held, window, stretches):
    found = np.array(mask_with_stretches(7, held, window, stretches))
    wanted = [[sees(query, key, held - 7, window, stretches) for key in range(held)] for query in range(7)]
    assert found.tolist() == wanted


@pytest.mark.parametrize("composed", [False, True])
def test_masked_attention_sees_what_its_mask_shows(composed):
    queries, keys, values = random(1, 1, HEADS, 7, DIM), random(2, 1, KV_HEADS, 9, DIM), random(3, 1, KV_HEADS, 9, DIM)
    mask = np.random.default_rng(4).random((7, 9)) < 0.5
    mask[:, 0] = True
    found = masked_attention(*map(mx.array, (queries, keys, values)), mx.array(mask), scale=SCALE, composed=composed)
    for head in range(HEADS):
        scores = (queries[0, head].astype(np.float64) @ keys[0, head // 2].T) * SCALE
        weights = np.where(mask, np.exp(scores), 0.0)
        wanted = weights / weights.sum(axis=1, keepdims=True) @ values[0, head // 2]
        np.testing.assert_allclose(np.array(found[0, head]), wanted, atol=2e-6)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("length", [1, 7])
def test_scores_are_bounded_by_a_soft_cap(length, window, composed):
    queries, keys = random(1, 1, HEADS, length, DIM) * 4, random(2, 1, KV_HEADS, 20, DIM) * 4
    values = random(3, 1, KV_HEADS, 20, DIM)
    parts = [mx.array(part) for part in (queries, keys, values)]
    found = causal_attention(*parts, scale=SCALE, softcap=3.0, window=window, composed=composed)
    np.testing.assert_allclose(np.array(found), naive(queries, keys, values, window, 3.0), atol=2e-6)
    uncapped = causal_attention(*parts, scale=SCALE, window=window, composed=composed)
    assert mx.abs(found - uncapped).max().item() > 0.1


def plain_cache():
    return KvCache()


def pooled_caches(pool):
    return lambda: pool.make_caches()[0]


CACHES = {"plain": lambda: plain_cache, "pooled": lambda: pooled_caches(KvPool(1))}


def packed(seed, lengths):
    total = sum(lengths)
    return [
        mx.array(random(seed + part, total, heads, 1, DIM)) for part, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]


def attend(caches, lengths, parts, softcap=0.0):
    segments = [PackedSegment(length, [cache]) for length, cache in zip(lengths, caches, strict=True)]
    return PackedAttention(segments, scale=SCALE, softcap=softcap)(*parts, layer=0)


@pytest.mark.parametrize("kind", CACHES)
def test_packed_segments_equal_each_row_alone(kind):
    """Rows of unlike lengths: prompts, then single tokens, then both at once, in an order that no slab has."""
    make = CACHES[kind]()
    together, alone = [make() for _ in range(6)], [CACHES[kind]()() for _ in range(6)]
    order = [3, 0, 5, 1, 4, 2]
    for step, lengths in enumerate(([5, 1, 9, 2, 1, 3], [1] * 6, [1, 7, 1, 1, 4, 1], [1] * 6)):
        rows = order if step % 2 else range(6)
        lengths = [lengths[row] for row in rows]
        parts = packed(10 * step, lengths)
        found = attend([together[row] for row in rows], lengths, parts)
        assert found.shape == (1, sum(lengths), HEADS * DIM)
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            cut = [part[start : start + length] for part in parts]
            wanted = attend([alone[row]], [length], cut)
            np.testing.assert_allclose(np.array(found[:, start : start + length]), np.array(wanted), atol=1e-6)
            start += length
    assert [cache.offset for cache in together] == [cache.offset for cache in alone] == [8, 10, 12, 5, 7, 6]


def test_every_kind_of_cache_keeps_the_soft_cap():
    lengths = [5, 1, 3]
    parts = packed(4, lengths)
    plain, pooled = (
        attend([make() for _ in lengths], lengths, parts, softcap=0.5) for make in (KvCache, pooled_caches(KvPool(1)))
    )
    np.testing.assert_allclose(np.array(plain), np.array(pooled), atol=1e-6)
    assert mx.abs(plain - attend([KvCache() for _ in lengths], lengths, parts)).max().item() > 0.01


def test_plain_rows_are_the_same_bits_in_company():
    lengths = [1, 6, 1, 3]
    parts = packed(4, lengths)
    found = attend([KvCache() for _ in lengths], lengths, parts)
    start = 0
    for length in lengths:
        wanted = attend([KvCache()], [length], [part[start : start + length] for part in parts])
        assert mx.array_equal(found[:, start : start + length], wanted).item()
        start += length
