"""Packed attention by compiled code against that by array operations, over the storage that both share."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.graph import PackedSegment
from engine.ops.attention import PackedAttention
from engine.ops.exponential import swiglu
from engine.ops.host_attention import swiglu_on_host
from engine.runtime.host_kernels import HostKernels
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import KvPool
from engine.state.plain_codec import PlainCodec

HEADS, KV_HEADS, DIM = 6, 2, 32
STEPS = ([5, 1, 250, 2, 1, 3], [1] * 6, [1, 300, 1, 1, 4, 1], [1] * 6, [2, 1, 30, 1, 1, 260], [1] * 6)


@pytest.fixture(scope="module")
def kernels():
    found = HostKernels.of_this_process()
    if found is None:
        pytest.skip("there are no compiled kernels for this processor, or no C compiler")
    return found


def attention(caches, lengths, kernels=None, **choices):
    segments = [PackedSegment(length, [cache]) for length, cache in zip(lengths, caches, strict=True)]
    return PackedAttention(segments, scale=DIM**-0.5, kernels=kernels, **choices)


def packed(seed, tokens):
    random = np.random.default_rng(seed)
    return [
        mx.array(random.normal(size=(tokens, heads, 1, DIM)).astype(np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def test_rows_equal_plain_ones_through_growth_and_in_any_order(kernels):
    """They outgrow their slabs on the way, and sit in several."""
    pool = KvPool(1)
    rows, plain = [pool.make_caches()[0] for _ in range(6)], [KvCache(PlainCodec(composed=True)) for _ in range(6)]
    for number, lengths in enumerate(STEPS):
        order = [3, 0, 5, 1, 4, 2] if number % 2 else list(range(6))
        lengths = [lengths[row] for row in order]
        parts = packed(number, sum(lengths))
        found = attention([rows[row] for row in order], lengths, kernels)(*parts, layer=0)
        wanted = attention([plain[row] for row in order], lengths)(*parts, layer=0)
        np.testing.assert_allclose(np.array(found), np.array(wanted), atol=3e-6)
    assert [row.offset for row in rows] == [row.offset for row in plain]
    kept = [row.snapshot().arrays for row in (rows[2], plain[2])]
    assert all(mx.array_equal(kept[0][name], kept[1][name]).item() for name in kept[1])


def test_a_row_has_the_same_bits_whoever_sits_beside_it(kernels):
    lone, pool = KvPool(1).make_caches()[0], KvPool(1)
    seated, *others = [pool.make_caches()[0] for _ in range(5)]
    for number, length in enumerate((9, 1, 1, 40, 1)):
        parts = packed(number, length + 20)
        together = attention([*others[:2], seated, *others[2:]], [3, 1, length, 6, 10], kernels)(*parts, layer=0)
        alone = attention([lone], [length], kernels)(*(part[4 : 4 + length] for part in parts), layer=0)
        assert mx.array_equal(together[:, 4 : 4 + length], alone).item()


def test_storage_may_be_used_by_both_in_turns(kernels):
    """A step by array operations leaves writes behind that are not computed yet."""
    mixed, plain = KvPool(1).make_caches()[0], KvCache(PlainCodec(composed=True))
    for number, length in enumerate((4, 1, 1, 3, 1, 1)):
        parts = packed(number, length)
        found = attention([mixed], [length], kernels if number % 2 else None)(*parts, layer=0)
        wanted = attention([plain], [length])(*parts, layer=0)
        np.testing.assert_allclose(np.array(found), np.array(wanted), atol=3e-6)


def test_a_layer_may_attend_to_what_another_has_appended(kernels):
    caches, plain = [KvPool(1).make_caches()[0]], [KvCache(PlainCodec(composed=True))]
    parts, later = packed(1, 7), packed(2, 7)[0]
    results = []
    for rows, code in ((caches, kernels), (plain, None)):
        step = attention(rows, [7], code)
        step(*parts, layer=0, kept=True)
        results.append(np.array(step.again(later, layer=0)))
    np.testing.assert_allclose(*results, atol=3e-6)
    assert caches[0].offset == 7


def test_a_snapshot_is_not_changed_by_what_is_written_in_place_later(kernels):
    row = KvPool(1).make_caches()[0]
    attention([row], [5], kernels)(*packed(1, 5), layer=0)
    taken = row.snapshot()
    before = {name: np.array(part) for name, part in taken.arrays.items()}
    row.trim(2)
    attention([row], [3], kernels)(*packed(2, 3), layer=0)
    assert row.offset == 6
    for name, part in taken.arrays.items():
        assert np.array(part).tobytes() == before[name].tobytes()


def test_bounded_scores_are_left_to_array_operations(kernels):
    parts = packed(1, 5)
    found = attention([KvPool(1).make_caches()[0]], [5], kernels, softcap=0.5)(*parts, layer=0)
    wanted = attention([KvCache(PlainCodec(composed=True))], [5], softcap=0.5)(*parts, layer=0)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=3e-6)


def test_gates_may_be_halves_of_one_product(kernels):
    both = mx.array(np.random.default_rng(3).normal(size=(1, 9, 2 * 48)).astype(np.float32))
    gate, up = mx.split(both, 2, axis=-1)
    found = swiglu_on_host(kernels, gate, up)
    assert found.shape == gate.shape
    np.testing.assert_allclose(np.array(found), np.array(swiglu(gate, up, composed=False)), rtol=3e-6, atol=1e-7)
