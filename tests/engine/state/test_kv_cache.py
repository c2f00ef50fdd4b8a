"""The plain cache: appending in any cuts equals one append, across growth, trims and reuse."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.cache import GROWTH_TOKENS
from engine.state.kv_cache import KvCache

KV_HEADS, HEADS, DIM = 2, 4, 4


def tokens(seed, count):
    generator = np.random.default_rng(seed)
    return [
        mx.array(generator.normal(size=(1, heads, count, DIM)).astype(np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def attend_in_cuts(cache, parts, cuts):
    queries, keys, values = parts
    outputs, start = [], 0
    for cut in [*cuts, queries.shape[2]]:
        if cut > start:
            outputs.append(
                cache.attend(queries[:, :, start:cut], keys[:, :, start:cut], values[:, :, start:cut], scale=0.5)
            )
            start = cut
    return np.array(mx.concatenate(outputs, axis=2))


@given(st.integers(2, 40), st.data(), st.sampled_from([0, 3, 16]))
@settings(max_examples=40, deadline=None)
def test_any_cuts_give_what_one_append_gives(count, data, window):
    cuts = sorted(data.draw(st.lists(st.integers(1, count - 1), max_size=5)))
    parts = tokens(count, count)
    whole = attend_in_cuts(KvCache(window=window), parts, [])
    np.testing.assert_allclose(attend_in_cuts(KvCache(window=window), parts, cuts), whole, atol=1e-6)


@pytest.mark.parametrize("count", [GROWTH_TOKENS - 1, GROWTH_TOKENS, GROWTH_TOKENS + 1, 2 * GROWTH_TOKENS + 3])
def test_growth_keeps_what_was_written(count):
    parts = tokens(1, count)
    cache = KvCache()
    found = attend_in_cuts(cache, parts, [5, GROWTH_TOKENS - 1, GROWTH_TOKENS])
    np.testing.assert_allclose(found, attend_in_cuts(KvCache(), parts, []), atol=1e-6)
    assert cache.offset == count
    assert cache.nbytes == 2 * KV_HEADS * DIM * 4 * -(-count // GROWTH_TOKENS) * GROWTH_TOKENS


def test_trimmed_tokens_leave_no_trace():
    parts, wrong = tokens(1, 30), tokens(2, 9)
    cache = KvCache()
    attend_in_cuts(cache, [part[:, :, :20] for part in parts], [])
    attend_in_cuts(cache, wrong, [])
    assert cache.trimmable_tokens == 29
    cache.trim(9)
    assert cache.offset == 20
    tail = attend_in_cuts(cache, [part[:, :, 20:] for part in parts], [])
    np.testing.assert_allclose(tail, attend_in_cuts(KvCache(), parts, [])[:, :, 20:], atol=1e-6)


def test_a_closed_cache_holds_nothing():
    cache = KvCache()
    attend_in_cuts(cache, tokens(1, 3), [])
    cache.close()
    assert (cache.offset, cache.nbytes, list(cache.arrays())) == (0, 0, [])
