"""Recurrent layers in a packed step: rows of any lengths, each from its own state, against one row at a time."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.graph import PackedSegment, RecurrentGeometry
from engine.ops.packed_recurrence import PackedRecurrence, RecurrentTokens, causal_convolution
from engine.state.recurrent_cache import RecurrentCache

SIZES = RecurrentGeometry(key_heads=2, value_heads=4, key_dim=8, value_dim=16, convolution_tokens=4)
KERNEL = mx.array(np.random.default_rng(9).normal(size=(4, SIZES.channels)).astype(np.float32))


def text(tokens, seed):
    random = np.random.default_rng(seed)
    channels = random.normal(size=(tokens, SIZES.channels))
    decays = -np.exp(random.normal(size=(tokens, SIZES.value_heads)) - 2)
    strengths = random.uniform(size=(tokens, SIZES.value_heads))
    return RecurrentTokens(
        channels=mx.array(channels.astype(np.float32)),
        log_decays=mx.array(decays.astype(np.float32)),
        strengths=mx.array(strengths.astype(np.float32)),
    )


def joined(parts):
    return RecurrentTokens(
        **{name: mx.concatenate([getattr(p, name) for p in parts]) for name in RecurrentTokens.__slots__}
    )


def cut(tokens, start, end):
    return RecurrentTokens(**{name: getattr(tokens, name)[start:end] for name in RecurrentTokens.__slots__})


def step(caches, parts):
    """One step of several rows; returns what each one's tokens read."""
    segments = [PackedSegment(part.channels.shape[0], [cache]) for cache, part in zip(caches, parts, strict=True)]
    read = PackedRecurrence(segments, SIZES)(joined(parts), KERNEL, layer=0)
    ends = np.cumsum([segment.length for segment in segments])
    return mx.split(read, ends[:-1].tolist(), axis=0)


def test_a_convolution_sees_the_newest_positions_of_its_own_channel():
    seen = np.random.default_rng(1).normal(size=(2, 3 + 5, 6)).astype(np.float32)
    kernel = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    wanted = [[(seen[row, place : place + 4] * kernel).sum(axis=0) for place in range(5)] for row in range(2)]
    found = causal_convolution(mx.array(seen), mx.array(kernel))
    np.testing.assert_allclose(np.array(found), wanted, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 5), (1, 7, 1, 3, 7, 1), (2, 1)])
def test_rows_in_company_are_the_same_bits_as_alone(lengths):
    texts = [text(12, seed) for seed in range(len(lengths))]
    together, alone = ([RecurrentCache() for _ in lengths] for _ in range(2))
    for first, second in ((0, 4), (4, None)):
        ends = [4 if second == 4 else 4 + length for length in lengths]
        parts = [cut(whole, first, end) for whole, end in zip(texts, ends, strict=True)]
        for found, cache, part in zip(step(together, parts), alone, parts, strict=True):
            assert mx.array_equal(found, step([cache], [part])[0]).item()
    assert [cache.offset for cache in together] == [4 + length for length in lengths]


@pytest.mark.parametrize("cuts", [(1,), (3, 4, 5), (2, 9, 10, 11), tuple(range(1, 12))])
def test_a_text_reads_the_same_however_it_is_cut(cuts):
    whole, cache = text(12, 3), RecurrentCache()
    wanted = step([RecurrentCache()], [whole])[0]
    bounds = [0, *cuts, 12]
    parts = [cut(whole, *pair) for pair in itertools.pairwise(bounds)]
    found = mx.concatenate([step([cache], [part])[0] for part in parts])
    assert mx.abs(wanted).max().item() > 0.1
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=2e-6)


def test_a_token_that_was_taken_back_leaves_no_trace():
    whole, other = text(12, 3), text(12, 4)
    cache, twin = RecurrentCache(), RecurrentCache()
    for each in (cache, twin):
        step([each], [cut(whole, 0, 9)])
    step([cache], [cut(other, 0, 1)])
    cache.trim(1)
    tail = cut(whole, 9, 12)
    assert mx.array_equal(step([cache], [tail])[0], step([twin], [tail])[0]).item()
