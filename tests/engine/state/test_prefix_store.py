"""The store never exceeds its bytes, never gives a state that cannot be cut so, and drops the least used first."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.contracts.snapshot import LayerSnapshot
from engine.state.prefix_index import key_tokens, token_key
from engine.state.prefix_store import PrefixEntry, PrefixStore

BYTES_PER_TOKEN = 96


def entry(tokens, *, namespace="", least_tokens=0, of_session=False):
    arrays = {"keys": np.zeros((1, 1, len(tokens), BYTES_PER_TOKEN), dtype=np.int8)}
    layer = LayerSnapshot(kind="plain", tokens=len(tokens), least_tokens=least_tokens, arrays=arrays)
    return PrefixEntry(namespace=namespace, key=token_key(tokens), snapshots=[layer], of_session=of_session)


def held(store):
    return [key_tokens(one.key) for one in store]


def found(store, prompt, **wishes):
    hit = store.find("", token_key(prompt), **wishes)
    return None if hit is None else (key_tokens(hit.entry.key), hit.tokens)


def roomy():
    return PrefixStore(10**6)


def test_the_longest_usable_prefix_is_found_and_the_last_token_is_always_computed():
    store = roomy()
    store.put(entry((1, 2, 3)))
    assert found(store, (1, 2, 9)) == ((1, 2, 3), 2)
    assert found(store, (1, 2, 3, 4)) == ((1, 2, 3), 3)
    assert found(store, (1, 2, 3)) == ((1, 2, 3), 2)
    assert found(store, (1,)) is None
    assert found(store, (9, 1)) is None


def test_what_cannot_be_cut_serves_only_whole():
    store = roomy()
    store.put(entry((1, 2, 3, 4), least_tokens=4))
    assert found(store, (1, 2, 3, 9)) is None
    assert found(store, (1, 2, 3, 4)) is None
    assert found(store, (1, 2, 3, 4, 5)) == ((1, 2, 3, 4), 4)


def test_a_shorter_entry_serves_where_the_longer_cannot_be_cut():
    store = roomy()
    store.put(entry((1, 2)))
    store.put(entry((1, 2, 3, 4), least_tokens=4))
    assert found(store, (1, 2, 3, 9)) == ((1, 2), 2)


def test_namespaces_never_mix():
    store = roomy()
    store.put(entry((1, 2, 3), namespace="salted"))
    assert store.find("", token_key((1, 2, 3, 4))) is None
    assert store.find("salted", token_key((1, 2, 3, 4))) is not None
    assert not store.covers("", token_key((1, 2)))


def test_a_longer_entry_takes_the_place_of_those_whose_work_it_does():
    store = roomy()
    store.put(entry((1, 2)))
    store.put(entry((1, 2, 3)))
    store.put(entry((1, 7)))
    assert held(store) == [(1, 2, 3), (1, 7)]
    store.put(entry((1, 2, 3, 4, 5), least_tokens=3))
    assert held(store) == [(1, 7), (1, 2, 3, 4, 5)]
    store.put(entry((1, 7, 8), least_tokens=3))
    assert held(store) == [(1, 7), (1, 2, 3, 4, 5), (1, 7, 8)]


def test_equal_tokens_replace():
    store = roomy()
    first, second = entry((1, 2)), entry((1, 2))
    store.put(first)
    store.put(second)
    assert list(store) == [second]
    assert store.nbytes == second.nbytes


def test_reuse_can_be_held_to_the_cuts_of_a_cold_prompt():
    store = roomy()
    store.put(entry(tuple(range(10))))
    assert found(store, (*range(10), 50), cut_tokens=4) == (tuple(range(10)), 8)
    assert found(store, (0, 1, 2, 50), cut_tokens=4) is None


def test_the_least_recently_used_goes_first_and_conversations_last():
    store = PrefixStore(3 * entry((1, 1)).nbytes)
    store.put(entry((1, 1), of_session=True))
    store.put(entry((2, 2)))
    store.put(entry((3, 3)))
    assert found(store, (2, 2, 2)) is not None
    store.put(entry((4, 4)))
    assert held(store) == [(2, 2), (4, 4), (1, 1)]
    store.put(entry((5, 5), of_session=True))
    store.put(entry((6, 6), of_session=True))
    assert held(store) == [(1, 1), (5, 5), (6, 6)]
    store.put(entry((7, 7)))
    assert held(store) == [(7, 7), (5, 5), (6, 6)]


def test_an_entry_above_the_limit_is_not_stored_and_costs_nobody_a_place():
    """Field report 51: the limit is parsed and never used; the last entry is never evicted though above the limit."""
    store = PrefixStore(entry((1, 2)).nbytes)
    store.put(entry((1, 2)))
    assert not store.put(entry((3, 4, 5)))
    assert held(store) == [(1, 2)]
    assert not store.put(entry((3, 4)), room_bytes=10)
    assert not PrefixStore(0).put(entry((1,)))


def test_a_hundred_prompts_stay_within_the_limit_and_the_count_is_the_real_size():
    """Field report 51: a cache of 1 MB grows to gigabytes."""
    store = PrefixStore(10_000)
    for number in range(100):
        store.put(entry(tuple(range(number, number + 20))))
        assert store.nbytes == sum(one.nbytes for one in store) <= 10_000
    assert len(store) == 5
    store.shrink(0)
    assert (store.nbytes, len(store)) == (0, 0)


class StoreAgainstList(RuleBasedStateMachine):
    """The oracle is a list in order of use, searched naively."""

    tokens = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=5).map(tuple)

    @initialize(tokens=st.integers(1, 12))
    def begin(self, tokens):
        self.limit = tokens * (BYTES_PER_TOKEN + 4)
        self.store = PrefixStore(self.limit)
        self.used = []

    def serves(self, one, count):
        least = one.snapshots[0].least_tokens
        return least <= count <= len(key_tokens(one.key))

    def usable(self, one, prompt):
        stored, count = key_tokens(one.key), 0
        while count < min(len(stored), len(prompt) - 1) and stored[count] == prompt[count]:
            count += 1
        return count if self.serves(one, count) else 0

    @rule(tokens=tokens, cut=st.booleans(), of_session=st.booleans())
    def put(self, tokens, cut, of_session):
        new = entry(tokens, least_tokens=0 if cut else len(tokens), of_session=of_session)
        assert self.store.put(new) == (new.nbytes <= self.limit)
        if new.nbytes > self.limit:
            return
        lengths = {len(tokens)} | {count for count in range(1, len(tokens)) if self.serves(new, count)}
        self.used = [
            one
            for one in self.used
            if not (tokens[: len(key_tokens(one.key))] == key_tokens(one.key) and len(key_tokens(one.key)) in lengths)
        ]
        while sum(one.nbytes for one in self.used) + new.nbytes > self.limit:
            self.used.remove(next((one for one in self.used if not one.of_session), self.used[0]))
        self.used.append(new)

    @rule(prompt=tokens)
    def find(self, prompt):
        hit = self.store.find("", token_key(prompt))
        assert (0 if hit is None else hit.tokens) == max((self.usable(one, prompt) for one in self.used), default=0)
        if hit is not None:
            assert self.usable(hit.entry, prompt) == hit.tokens
            self.used.remove(hit.entry)
            self.used.append(hit.entry)

    @rule(tokens=st.integers(0, 12))
    def shrink(self, tokens):
        room = tokens * (BYTES_PER_TOKEN + 4)
        self.store.shrink(room)
        while sum(one.nbytes for one in self.used) > room:
            self.used.remove(next((one for one in self.used if not one.of_session), self.used[0]))

    @invariant()
    def agrees(self):
        loose_first = sorted(self.used, key=lambda one: one.of_session)
        assert list(self.store) == loose_first
        assert self.store.nbytes == sum(one.nbytes for one in self.used) <= self.limit


TestStoreAgainstList = StoreAgainstList.TestCase
TestStoreAgainstList.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
