"""Pooled rows: each equals a plain cache through joins, leaves, growth, trims and reuse of its seat."""

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.contracts.graph import PackedSegment
from engine.ops.attention import PackedAttention
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import GROWTH_TOKENS, KvPool

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 4
SLOT_BYTES = 2 * KV_HEADS * DIM * 4 * GROWTH_TOKENS


class PooledRows(RuleBasedStateMachine):
    """Random company: every step is taken by the pooled rows together, and by a plain cache for each."""

    @initialize(seed=st.integers(0, 100))
    def start(self, seed):
        self.pool = KvPool(LAYERS)
        self.random = np.random.default_rng(seed)
        self.rows = []

    @rule()
    def join(self):
        if len(self.rows) < 7:
            self.rows.append((self.pool.make_caches(), [KvCache(composed=True) for _ in range(LAYERS)]))

    @rule(index=st.integers(0, 6))
    def leave(self, index):
        if index < len(self.rows):
            for cache in self.rows.pop(index)[0]:
                cache.close()

    @rule(index=st.integers(0, 6), count=st.integers(1, 5))
    def trim(self, index, count):
        if index < len(self.rows):
            for caches in self.rows[index]:
                for cache in caches:
                    cache.trim(count)

    @rule(data=st.data())
    def step(self, data):
        rows = data.draw(st.permutations(self.rows))
        rows = rows[: data.draw(st.integers(0, len(rows)))]
        if not rows:
            return
        lengths = [data.draw(st.sampled_from([1, 1, 1, 2, 9, 200])) for _ in rows]
        pooled, plain = (
            PackedAttention(
                [PackedSegment(length, row[kind]) for row, length in zip(rows, lengths, strict=True)], scale=0.5
            )
            for kind in (0, 1)
        )
        for layer in range(LAYERS):
            parts = [
                mx.array(self.random.normal(size=(sum(lengths), heads, 1, DIM)).astype(np.float32))
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            found, wanted = (np.array(attention(*parts, layer=layer)) for attention in (pooled, plain))
            np.testing.assert_allclose(found, wanted, atol=2e-6)

    @invariant()
    def the_books_agree(self):
        for pooled, plain in getattr(self, "rows", []):
            assert [cache.offset for cache in pooled] == [cache.offset for cache in plain]

    def teardown(self):
        for pooled, _ in getattr(self, "rows", []):
            for cache in pooled:
                cache.close()
        if hasattr(self, "pool"):
            assert self.pool.nbytes == 0


PooledRows.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPooledRows = PooledRows.TestCase


def append(caches, count):
    parts = [mx.zeros((1, heads, count, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for cache in caches:
        cache.attend(*parts, scale=1.0)


def test_four_short_rows_share_a_slab_and_a_long_one_sits_alone():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(5)]
    assert pool.nbytes == 0
    for row in rows[:4]:
        append(row, 10)
    assert pool.nbytes == 4 * LAYERS * SLOT_BYTES
    append(rows[4], 3 * GROWTH_TOKENS)
    assert pool.nbytes == 7 * LAYERS * SLOT_BYTES
    assert sum(cache.nbytes for cache in rows[4]) == 3 * LAYERS * SLOT_BYTES


def test_a_row_that_grows_frees_its_seat_for_the_next():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(5)]
    for row in rows[:4]:
        append(row, 10)
    append(rows[1], GROWTH_TOKENS)
    held = pool.nbytes
    append(rows[4], 10)
    assert pool.nbytes == held


def test_a_row_writes_in_place_when_others_have_read():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(2)]
    for row in rows:
        append(row, 10)
    mx.eval([cache.arrays() for row in rows for cache in row])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    append(rows[0], 1)
    mx.eval([cache.arrays() for cache in rows[0]])
    assert mx.get_peak_memory() - before < SLOT_BYTES


def test_closing_twice_gives_one_seat_back_once():
    pool = KvPool(LAYERS)
    first, second = pool.make_caches(), pool.make_caches()
    append(first, 1)
    append(second, 1)
    for _ in range(2):
        for cache in first:
            cache.close()
    assert [cache.nbytes for cache in first] == [0] * LAYERS
    assert pool.nbytes == 4 * LAYERS * SLOT_BYTES
