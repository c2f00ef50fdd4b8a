"""Pooled rows: each equals a plain cache through joins, leaves, growth, trims, and neighbours that are not finite."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.contracts.cache import GROWTH_TOKENS
from engine.contracts.graph import PackedSegment
from engine.generation.memory import row_bytes
from engine.ops.attention import PackedAttention
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import KvPool
from engine.state.plain_codec import PlainCodec
from tests.engine.state.oracle import HEADS, KV_HEADS, full_attention

LAYERS, DIM = 2, 4
ROW_BYTES = 2 * KV_HEADS * DIM * 4 * GROWTH_TOKENS
GEOMETRY = full_attention(LAYERS, DIM)


@dataclass
class Twins:
    """One row, pooled and plain; the tokens that it held at most, and the first of those that are not finite."""

    pooled: list
    plain: list
    most_tokens: int = 0
    bad_from: float = float("inf")

    @property
    def offset(self):
        return self.plain[0].offset


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
            self.rows.append(
                Twins(self.pool.make_caches(), [KvCache(PlainCodec(composed=True)) for _ in range(LAYERS)])
            )

    @rule(index=st.integers(0, 6))
    def leave(self, index):
        if index < len(self.rows):
            for cache in self.rows.pop(index).pooled:
                cache.close()

    @rule(index=st.integers(0, 6), count=st.integers(1, 5))
    def trim(self, index, count):
        if index < len(self.rows):
            row = self.rows[index]
            for cache in (*row.pooled, *row.plain):
                cache.trim(count)
            if row.offset <= row.bad_from:
                row.bad_from = float("inf")

    @rule(data=st.data())
    def step(self, data):
        rows = data.draw(st.permutations(self.rows))
        rows = rows[: data.draw(st.integers(0, len(rows)))]
        if not rows:
            return
        lengths = [data.draw(st.sampled_from([1, 1, 1, 2, 9, 200])) for _ in rows]
        poisons = [data.draw(st.sampled_from([0, 0, 0, 0, np.nan, np.inf])) for _ in rows]
        for row, length, poison in zip(rows, lengths, poisons, strict=True):
            if poison:
                row.bad_from = min(row.bad_from, row.offset)
            row.most_tokens = max(row.most_tokens, row.offset + length)
        added = np.repeat(np.array(poisons, np.float32), lengths)[:, None, None, None]
        sound = np.repeat([row.bad_from == float("inf") for row in rows], lengths)
        pooled, plain = (
            PackedAttention(
                [PackedSegment(length, getattr(row, kind)) for row, length in zip(rows, lengths, strict=True)],
                scale=0.5,
            )
            for kind in ("pooled", "plain")
        )
        for layer in range(LAYERS):
            parts = [
                mx.array(self.random.normal(size=(sum(lengths), heads, 1, DIM)).astype(np.float32) + added)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            found, wanted = (np.array(attention(*parts, layer=layer)) for attention in (pooled, plain))
            assert np.isfinite(wanted[:, sound]).all()
            np.testing.assert_allclose(found[:, sound], wanted[:, sound], atol=2e-6)

    @invariant()
    def the_books_agree(self):
        for row in getattr(self, "rows", []):
            assert [cache.offset for cache in row.pooled] == [cache.offset for cache in row.plain]

    @invariant()
    def no_more_is_held_than_was_predicted(self):
        if hasattr(self, "pool"):
            predicted = sum(row_bytes(GEOMETRY, row.most_tokens, 4) for row in self.rows)
            assert self.pool.nbytes <= predicted
            assert self.pool.nbytes == sum(cache.nbytes for row in self.rows for cache in row.pooled)

    def teardown(self):
        for row in getattr(self, "rows", []):
            for cache in row.pooled:
                cache.close()
        if hasattr(self, "pool"):
            assert self.pool.nbytes == 0


PooledRows.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPooledRows = PooledRows.TestCase


def append(caches, count, value=0.0):
    parts = [mx.full((1, heads, count, DIM), value) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [cache.attend(*parts, scale=1.0) for cache in caches]


def step_together(rows, value=1.0):
    attention = PackedAttention([PackedSegment(1, row) for row in rows], scale=1.0)
    parts = [mx.full((len(rows), heads, 1, DIM), value) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return mx.concatenate([attention(*parts, layer=layer)[0] for layer in range(LAYERS)], axis=-1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("seat", [0, 1, 2])
def test_whoever_takes_the_seat_of_a_row_that_was_not_finite_sees_nothing_of_it(poison, seat):
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(3)]
    for index, row in enumerate(rows):
        append(row, 60, poison if index == seat else 1.0)
    for cache in rows[seat]:
        cache.close()
    rows[seat] = pool.make_caches()
    append(rows[seat], 3, 1.0)
    assert mx.array_equal(step_together(rows), mx.ones((3, LAYERS * HEADS * DIM))).item()


def test_tokens_that_were_trimmed_stay_unseen_beside_a_longer_row():
    pool = KvPool(LAYERS)
    short, long = pool.make_caches(), pool.make_caches()
    append(short, 2, 1.0)
    append(short, 9, float("nan"))
    append(long, 60, 1.0)
    for cache in short:
        cache.trim(9)
    assert mx.array_equal(step_together([short, long]), mx.ones((2, LAYERS * HEADS * DIM))).item()


def test_a_row_that_is_not_finite_and_stands_idle_between_others_is_not_seen():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(3)]
    for row, value in zip(rows, (1.0, float("nan"), 1.0), strict=True):
        append(row, 5, value)
    found = step_together([rows[0], rows[2]])
    assert mx.array_equal(found, mx.ones((2, LAYERS * HEADS * DIM))).item()


def test_rows_that_leave_give_their_memory_back_before_anybody_steps():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(4)]
    before = mx.get_active_memory()
    for row in rows:
        append(row, 10)
    mx.eval([cache.arrays() for row in rows for cache in row])
    assert mx.get_active_memory() - before >= 4 * LAYERS * ROW_BYTES
    for row in rows[:3]:
        for cache in row:
            cache.close()
    mx.synchronize()
    assert LAYERS * ROW_BYTES <= mx.get_active_memory() - before < 2 * LAYERS * ROW_BYTES


def test_rows_hold_what_they_need_and_no_free_seats():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(5)]
    assert pool.nbytes == 0
    for row in rows[:4]:
        append(row, 10)
    assert pool.nbytes == 4 * LAYERS * ROW_BYTES
    append(rows[4], 3 * GROWTH_TOKENS)
    assert pool.nbytes == 7 * LAYERS * ROW_BYTES
    assert sum(cache.nbytes for cache in rows[4]) == 3 * LAYERS * ROW_BYTES


def test_a_row_that_grows_frees_its_seat_for_the_next():
    pool = KvPool(LAYERS)
    rows = [pool.make_caches() for _ in range(5)]
    for row in rows[:4]:
        append(row, 10)
    append(rows[1], GROWTH_TOKENS)
    assert pool.nbytes == 5 * LAYERS * ROW_BYTES
    append(rows[4], 10)
    assert pool.nbytes == 6 * LAYERS * ROW_BYTES
    assert [row[0].place_for(1).table for row in rows].count(rows[0][0].place_for(1).table) == 4


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
    assert mx.get_peak_memory() - before < ROW_BYTES


def test_closing_twice_gives_one_seat_back_once():
    pool = KvPool(LAYERS)
    first, second = pool.make_caches(), pool.make_caches()
    append(first, 1)
    append(second, 1)
    for _ in range(2):
        for cache in first:
            cache.close()
    assert [cache.nbytes for cache in first] == [0] * LAYERS
    assert pool.nbytes == LAYERS * ROW_BYTES


def attended(caches, packed, *, ends_alone=False):
    """One layer's step of one row: [T, H·D] of `packed` queries, keys and values."""
    segment = PackedSegment(packed[0].shape[0], caches, ends_alone=ends_alone)
    return PackedAttention([segment], scale=0.5)(*packed, layer=0)[0]


@pytest.mark.parametrize("lengths", [[3], [3, 9, 1], [1, 1, 5, 4], [7, 7, 7, 7, 7]])
def test_a_last_token_that_attends_by_itself_has_the_bits_of_a_step_of_its_own(lengths):
    random, pool = np.random.default_rng(len(lengths)), KvPool(1)
    rows, alone = ([made.make_caches() for _ in lengths] for made in (pool, KvPool(1)))
    tokens = [
        [
            mx.array(random.normal(size=(length, heads, 1, DIM)).astype(np.float32))
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        for length in lengths
    ]
    segments = [
        PackedSegment(length, caches, ends_alone=length > 2) for length, caches in zip(lengths, rows, strict=True)
    ]
    packed = [mx.concatenate(list(parts), axis=0) for parts in zip(*tokens, strict=True)]
    together = PackedAttention(segments, scale=0.5)(*packed, layer=0)[0]
    apart = []
    for caches, parts in zip(alone, tokens, strict=True):
        apart += [attended(caches, [part[:-1] for part in parts])] if parts[0].shape[0] > 1 else []
        apart.append(attended(caches, [part[-1:] for part in parts]))
    assert mx.array_equal(together, mx.concatenate(apart, axis=0)).item()
    assert [caches[0].offset for caches in rows] == lengths
