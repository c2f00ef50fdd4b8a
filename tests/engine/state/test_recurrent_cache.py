"""The state of a recurrent layer: it grows with nothing, is never cut, and takes one token back."""

import mlx.core as mx
import pytest

from engine.contracts.composition import Composition
from engine.contracts.graph import LINEAR_ATTENTION, GraphGeometry, RecurrentGeometry
from engine.generation.memory import row_bytes
from engine.state.build import CacheBuilder
from engine.state.recurrent_cache import RecurrentCache

SIZES = RecurrentGeometry(key_heads=2, value_heads=4, key_dim=8, value_dim=16, convolution_tokens=4)


def state(value):
    tail = mx.full((1, SIZES.convolution_tokens - 1, SIZES.channels), value)
    return tail, mx.full((1, SIZES.value_heads, SIZES.value_dim, SIZES.key_dim), value)


def written(*steps):
    cache = RecurrentCache()
    for value, tokens in steps:
        cache.write(*state(value), tokens=tokens)
    return cache


def held(cache):
    """The one value that the state is filled with."""
    tail, _ = cache.read()
    return tail[0, 0, 0].item()


def test_the_one_token_appended_last_is_taken_back_exactly():
    cache = written((1.0, 7), (2.0, 1))
    before = written((1.0, 7))
    cache.trim(1)
    assert cache.offset == 7
    assert all(mx.array_equal(*pair).item() for pair in zip(cache.read(), before.read(), strict=True))
    cache.write(*state(3.0), tokens=1)
    assert (cache.offset, held(cache)) == (8, 3.0)


def test_a_first_token_can_be_taken_back_too():
    cache = written((1.0, 1))
    cache.trim(1)
    assert (cache.offset, cache.read(), cache.nbytes) == (0, None, 0)


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [([(1.0, 7)], 1), ([(1.0, 7), (2.0, 1)], 2), ([(1.0, 1), (2.0, 3)], 1), ([], 1)],
    ids=["a stretch", "two tokens", "a stretch after a token", "nothing"],
)
def test_nothing_else_is_ever_forgotten(steps, tokens):
    cache = written(*steps)
    assert cache.trimmable_tokens < tokens
    with pytest.raises(ValueError, match="cannot forget"):
        cache.trim(tokens)
    assert cache.offset == sum(count for _, count in steps)


def test_a_token_is_taken_back_once():
    cache = written((1.0, 7), (2.0, 1), (3.0, 1))
    cache.trim(1)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.trim(1)
    assert held(cache) == 2.0


def test_a_snapshot_fills_a_fresh_cache_at_its_own_length_alone():
    cache = written((1.0, 7), (2.0, 1))
    taken = cache.snapshot()
    assert (taken.tokens, taken.least_tokens) == (8, 8)
    cache.write(*state(9.0), tokens=1)
    heir = RecurrentCache()
    with pytest.raises(ValueError, match="cannot be cut"):
        heir.restore(taken, 7)
    heir.restore(taken, 8)
    assert (heir.offset, held(heir)) == (8, 2.0)
    with pytest.raises(ValueError, match="no token"):
        RecurrentCache().snapshot()


@pytest.mark.parametrize("library_arithmetic", [False, True], ids=["pooled", "alone"])
def test_prediction_covers_what_a_row_holds_however_long(library_arithmetic):
    geometry = GraphGeometry(
        vocab_size=4,
        hidden_size=16,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=8,
        context_length=4096,
        layer_types=(LINEAR_ATTENTION, LINEAR_ATTENTION, "full_attention"),
        layer_key_values=(0, 0, 8),
        recurrent=SIZES,
    )
    caches = CacheBuilder(geometry, Composition(library_arithmetic=library_arithmetic)).make_caches()
    token = [mx.zeros((1, heads, 1, 8)) for heads in (2, 1, 1)]
    for cache in caches[:2]:
        cache.write(*state(1.0), tokens=1)
        cache.write(*state(2.0), tokens=1)
    for _ in range(2):
        caches[2].attend(*token, scale=1.0)
    found = sum(cache.nbytes for cache in caches)
    assert found == row_bytes(geometry, 2, 4)
    assert row_bytes(geometry, 512, 4) - row_bytes(geometry, 256, 4) == 256 * 2 * 8 * 4
    assert SIZES.nbytes(4) == 4 * 16 * 8 * 4 + 3 * SIZES.channels * 4


def test_closing_lets_go_of_everything():
    cache = written((1.0, 7), (2.0, 1))
    cache.close()
    assert (cache.nbytes, list(cache.arrays()), cache.read()) == (0, [], None)
