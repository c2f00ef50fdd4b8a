"""Paged storage: rows that begin alike hold the same blocks, nobody writes into them, and bytes are counted once."""

import gc

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.composition import Composition, PagedKvComposition
from engine.contracts.snapshot import LayerSnapshot
from engine.state.build import CacheBuilder
from tests.engine.state.oracle import KV_HEADS, full_attention, random_tokens

LAYERS, DIM = 3, 16
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * DIM * 4
GEOMETRY = full_attention(LAYERS, DIM)


@pytest.fixture
def builder():
    return CacheBuilder(GEOMETRY, Composition(paged_kv=PagedKvComposition()))


def append(caches, count, seed=0):
    parts = random_tokens(np.random.default_rng(seed), count, DIM)
    found = mx.concatenate([cache.attend(*parts, scale=0.25) for cache in caches])
    mx.eval(found, [cache.arrays() for cache in caches])
    return found


def taken(caches):
    return [cache.snapshot() for cache in caches]


def held_bytes(*rows):
    return sum(cache.nbytes for row in rows for cache in row)


def test_sixteen_rows_with_one_prefix_hold_less_than_a_third_more_than_one_row(builder):
    gc.collect()
    before = mx.get_active_memory()
    first = builder.make_caches()
    append(first, 2000)
    append(first, 1)
    one_row = mx.get_active_memory() - before
    assert held_bytes(first) == 2016 * TOKEN_BYTES
    for cache in first:
        cache.trim(1)
    rows = [first, *(builder.restore(taken(first), 2000) for _ in range(15))]
    for seed, row in enumerate(rows):
        for step in range(32):
            append(row, 1, seed=100 * seed + step)
    gc.collect()
    assert mx.get_active_memory() - before <= 1.3 * one_row
    assert builder._blocks.nbytes == (2000 + 16 * 32) * TOKEN_BYTES
    assert 0 <= builder._blocks.nbytes - held_bytes(*rows) < 16 * 9 * LAYERS
    for row in rows:
        for cache in row:
            cache.close()
    assert builder._blocks.nbytes == 0


def test_what_rows_share_stays_until_the_last_of_them_leaves(builder):
    donor = builder.make_caches()
    append(donor, 300)
    snapshots = taken(donor)
    heirs = [builder.restore(snapshots, 300), builder.restore(snapshots, 100)]
    assert builder._blocks.nbytes == 300 * TOKEN_BYTES
    for cache in donor:
        cache.close()
        cache.close()
    assert builder._blocks.nbytes == 300 * TOKEN_BYTES
    for cache in heirs[0]:
        cache.close()
    assert builder._blocks.nbytes == 256 * TOKEN_BYTES
    for cache in heirs[1]:
        cache.close()
    assert builder._blocks.nbytes == 0


def test_nobody_writes_into_a_block_that_others_hold(builder):
    donor, cold = builder.make_caches(), builder.make_caches()
    for caches in (donor, cold):
        append(caches, 40)
    snapshots = taken(donor)
    before = [np.array(array) for snapshot in snapshots for array in snapshot.arrays.values()]
    heir = builder.restore(snapshots, 30)
    append(heir, 5, seed=7)
    append(donor, 3, seed=8)
    for cache in donor:
        cache.trim(20)
    append(donor, 9, seed=9)
    after = [np.array(array) for snapshot in snapshots for array in snapshot.arrays.values()]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    again = builder.restore(snapshots, 40)
    assert mx.array_equal(append(again, 1, seed=1), append(cold, 1, seed=1)).item()


def test_trimming_gives_whole_blocks_back(builder):
    caches = builder.make_caches()
    append(caches, 600)
    assert held_bytes(caches) == (256 + 256 + 96) * TOKEN_BYTES
    for cache in caches:
        cache.trim(100)
    assert held_bytes(caches) == 512 * TOKEN_BYTES
    for cache in caches:
        cache.trim(600)
        assert (cache.offset, cache.nbytes) == (0, 0)


def test_a_snapshot_that_went_through_a_file_is_taken_again(builder):
    donor, cold = builder.make_caches(), builder.make_caches()
    for caches in (donor, cold):
        append(caches, 300)
    copies = [
        LayerSnapshot(
            kind=snapshot.kind,
            tokens=snapshot.tokens,
            facts=dict(snapshot.facts),
            arrays={name: mx.array(np.array(array)) for name, array in reversed(snapshot.arrays.items())},
        )
        for snapshot in taken(donor)
    ]
    for cache in donor:
        cache.close()
    warm = builder.restore(copies, 300)
    assert mx.array_equal(append(warm, 1, seed=1), append(cold, 1, seed=1)).item()
    sibling = builder.restore(copies, 300)
    assert builder._blocks.nbytes == (300 + 32) * TOKEN_BYTES + held_bytes(cold)
    assert held_bytes(sibling) > 0


def test_a_snapshot_costs_nothing_but_the_end_of_a_block(builder):
    caches = builder.make_caches()
    append(caches, 256)
    before = mx.get_active_memory()
    snapshots = taken(caches)
    assert sum(snapshot.nbytes for snapshot in snapshots) == 256 * TOKEN_BYTES
    assert mx.get_active_memory() - before < 16 * TOKEN_BYTES
