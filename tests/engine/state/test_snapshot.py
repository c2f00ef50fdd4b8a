"""Snapshots: a row that begins with one equals a cold row bit for bit, and neither row harms the other."""

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.cache import GROWTH_TOKENS
from engine.contracts.composition import Composition
from engine.contracts.kv_scheme import AffineKv
from engine.contracts.snapshot import usable_tokens
from engine.state.build import CacheBuilder
from tests.engine.state.oracle import HEADS, KV_HEADS, full_attention

LAYERS, DIM = 2, 4
GEOMETRY = full_attention(LAYERS, DIM)
KINDS = {"alone": Composition(library_arithmetic=True), "pooled": Composition()}


@pytest.fixture(params=KINDS)
def builder(request):
    return CacheBuilder(GEOMETRY, KINDS[request.param])


def stretch(start, count, seed=0):
    """Queries, keys and values of positions [start, start + count) of one endless text."""
    generator = np.random.default_rng(seed)
    whole = [generator.normal(size=(1, heads, 2048, DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [mx.array(part[:, :, start : start + count]) for part in whole]


def append(caches, start, count, seed=0):
    parts = stretch(start, count, seed)
    found = mx.concatenate([cache.attend(*parts, scale=0.5) for cache in caches])
    mx.eval(found)
    return found


def taken(caches):
    return [cache.snapshot() for cache in caches]


def content(caches):
    return [np.array(array) for snapshot in taken(caches) for array in snapshot.arrays.values()]


@pytest.mark.parametrize(("held", "cut"), [(20, 20), (20, 7), (GROWTH_TOKENS, GROWTH_TOKENS), (700, 255), (700, 700)])
def test_a_restored_row_equals_a_cold_one_bit_for_bit(builder, held, cut):
    donor, cold = builder.make_caches(), builder.make_caches()
    append(donor, 0, held)
    append(cold, 0, cut)
    snapshots = taken(donor)
    assert usable_tokens(snapshots, cut) == cut
    warm = builder.restore(snapshots, cut)
    assert [cache.offset for cache in warm] == [cut] * LAYERS
    assert [cache.nbytes for cache in warm] == [cache.nbytes for cache in cold]
    for start, count in ((cut, 1), (cut + 1, 1), (cut + 2, 9)):
        assert mx.array_equal(append(warm, start, count), append(cold, start, count)).item()


def test_donor_and_heir_go_on_without_a_trace_of_each_other(builder):
    donor, twin = builder.make_caches(), builder.make_caches()
    for caches in (donor, twin):
        append(caches, 0, 40)
    snapshots = taken(donor)
    before = [np.array(array) for snapshot in snapshots for array in snapshot.arrays.values()]
    first, second = builder.restore(snapshots, 30), builder.restore(snapshots, 40)
    append(first, 30, 12, seed=9)
    for cache in second:
        cache.trim(5)
    assert mx.array_equal(append(donor, 40, 3), append(twin, 40, 3)).item()
    for cache in donor:
        cache.trim(20)
    append(donor, 23, 4, seed=5)
    for cache in donor:
        cache.close()
    after = [np.array(array) for snapshot in snapshots for array in snapshot.arrays.values()]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    again = builder.restore(snapshots, 40)
    assert all(np.array_equal(*pair) for pair in zip(content(again), before, strict=True))


def peak_of_one_token(caches, held):
    """The least of a few appends: the library sometimes lets go of a finished operation's arrays a moment late."""
    peaks = []
    for token in range(held, held + 8):
        parts = stretch(token, 1)
        mx.eval(parts, [cache.arrays() for cache in caches])
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval([cache.attend(*parts, scale=0.5) for cache in caches], [cache.arrays() for cache in caches])
        peaks.append(mx.get_peak_memory() - before)
    return min(peaks)


def test_a_snapshot_keeps_the_tokens_alone_and_costs_the_donor_at_most_one_copy(builder):
    donor, twin = builder.make_caches(), builder.make_caches()
    held = 3 * GROWTH_TOKENS - 40
    for caches in (donor, twin):
        append(caches, 0, held)
    snapshots = taken(donor)
    assert sum(snapshot.nbytes for snapshot in snapshots) == LAYERS * held * 2 * KV_HEADS * DIM * 4
    layer_bytes = donor[0].nbytes
    assert peak_of_one_token(donor, held) < peak_of_one_token(twin, held) + layer_bytes // 2


@pytest.mark.parametrize("composition", [*KINDS.values(), Composition(kv=AffineKv(bits=8, group_size=32))])
def test_the_bytes_of_snapshots_are_all_that_they_keep_alive(composition):
    """With one head, what a row holds lies at the beginning of its storage in one piece."""
    dim = 16 if composition in KINDS.values() else 32
    builder = CacheBuilder(replace(GEOMETRY, kv_heads=1, head_dim=dim, hidden_size=HEADS * dim), composition)
    mx.clear_cache()
    before, snapshots = mx.get_active_memory(), []
    for seed in range(20):
        caches = builder.make_caches()
        for cache in caches:
            queries, keys, values = (
                mx.random.normal((1, heads, 20, dim), key=mx.random.key(seed)) for heads in (4, 1, 1)
            )
            mx.eval(cache.attend(queries, keys, values, scale=0.5))
            cache.maintain()
        snapshots += taken(caches)
        for cache in caches:
            cache.close()
    del caches, cache, queries, keys, values
    del builder
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1.2 * sum(snapshot.nbytes for snapshot in snapshots)


def test_what_does_not_fit_is_refused_and_holds_nothing(builder):
    donor = builder.make_caches()
    with pytest.raises(ValueError, match="no token"):
        donor[0].snapshot()
    append(donor, 0, 12)
    snapshots = taken(donor)
    for tokens in (0, 13):
        with pytest.raises(ValueError, match="cannot be cut"):
            builder.restore(snapshots, tokens)
    with pytest.raises(ValueError, match="shorter"):
        builder.restore(snapshots[:1], 5)


def test_a_restored_row_sits_beside_others_like_a_cold_one():
    builder = CacheBuilder(GEOMETRY, Composition())
    donor, beside = builder.make_caches(), builder.make_caches()
    append(donor, 0, 40)
    append(beside, 0, 60, seed=3)
    warm = builder.restore(taken(donor), 25)
    places = {row[0].place_for(1).table for row in (donor, beside, warm)}
    assert len(places) == 1
    cold = builder.make_caches()
    append(cold, 0, 25)
    assert all(np.array_equal(*pair) for pair in zip(content(warm), content(cold), strict=True))
    assert mx.array_equal(append(warm, 25, 1), append(cold, 25, 1)).item()
