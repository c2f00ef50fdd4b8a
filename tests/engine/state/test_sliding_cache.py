"""Sliding layers: storage bounded by the window, the bits of a cache that keeps everything, and exact trims."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.contracts.cache import SLACK_TOKENS, window_capacity
from engine.contracts.snapshot import usable_tokens
from engine.state.kv_cache import KvCache
from engine.state.plain_codec import PlainCodec
from tests.engine.state.oracle import KV_HEADS, KeepsEverything, random_tokens

DIM = 4
TOKEN_BYTES = 2 * KV_HEADS * DIM * 4


def both(window, composed=True):
    oracle = KeepsEverything(dim=DIM, window=window, composed=composed)
    return KvCache(PlainCodec(composed=composed), window=window), oracle


class Sliding(RuleBasedStateMachine):
    """Appends of any width, trims as far as they are allowed, snapshots and restores, against the oracle."""

    @initialize(seed=st.integers(0, 99), window=st.sampled_from([1, 2, 5, 16, 40, 300]), composed=st.booleans())
    def start(self, seed, window, composed):
        self.random, self.window, self.composed = np.random.default_rng(seed), window, composed
        self.cache, self.oracle = both(window, composed)

    @rule(count=st.sampled_from([1, 1, 1, 1, 2, 7, 33, 80, 300]))
    def append(self, count):
        parts = random_tokens(self.random, count, DIM)
        found, wanted = (cache.attend(*parts, scale=0.5) for cache in (self.cache, self.oracle))
        assert mx.array_equal(found, wanted).item()
        if count == 1:
            assert self.cache.trimmable_tokens >= 1

    @rule(data=st.data())
    def trim(self, data):
        count = data.draw(st.integers(0, self.cache.trimmable_tokens))
        self.cache.trim(count)
        self.oracle.cut(self.oracle.offset - count)

    @rule()
    def refuse_more(self):
        if self.cache.trimmable_tokens < self.cache.offset:
            with pytest.raises(ValueError, match="window"):
                self.cache.trim(self.cache.trimmable_tokens + 1)

    @precondition(lambda self: self.oracle.offset > 0)
    @rule(data=st.data())
    def begin_again_from_a_snapshot(self, data):
        snapshot = self.cache.snapshot()
        assert snapshot.nbytes <= window_capacity(self.window) * TOKEN_BYTES
        kept = data.draw(st.integers(max(1, snapshot.least_tokens), snapshot.tokens))
        assert usable_tokens([snapshot], kept) == kept
        if snapshot.least_tokens:
            assert usable_tokens([snapshot], snapshot.tokens - 1) == 0
        self.cache.close()
        self.cache = KvCache(PlainCodec(composed=self.composed), window=self.window)
        self.cache.restore(snapshot, kept)
        self.oracle.cut(kept)

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "cache"):
            assert self.cache.offset == self.oracle.offset
            assert self.cache.nbytes <= window_capacity(self.window) * TOKEN_BYTES


Sliding.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSliding = Sliding.TestCase


def test_a_token_that_was_fed_by_mistake_is_taken_back_exactly_after_the_window_has_moved():
    cache, oracle = both(16)
    random = np.random.default_rng(0)
    for _ in range(3 * (16 + SLACK_TOKENS)):
        cache.attend(*random_tokens(random, 1, DIM), scale=0.5)
        cache.trim(1)
        parts = random_tokens(random, 1, DIM)
        assert mx.array_equal(cache.attend(*parts, scale=0.5), oracle.attend(*parts, scale=0.5)).item()


def test_a_sliding_layer_holds_its_window_whatever_it_has_read():
    cache, _ = both(16)
    cache.attend(*random_tokens(np.random.default_rng(0), 1000, DIM), scale=0.5)
    assert cache.nbytes == window_capacity(16) * TOKEN_BYTES
    assert cache.offset == 1000


def test_a_snapshot_of_another_window_is_refused():
    cache, _ = both(16)
    cache.attend(*random_tokens(np.random.default_rng(0), 100, DIM), scale=0.5)
    for other in (KvCache(window=17), KvCache()):
        with pytest.raises(ValueError, match="window"):
            other.restore(cache.snapshot(), 100)
