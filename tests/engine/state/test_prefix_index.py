"""The index finds what a naive search over all lists finds, whatever was added and removed before."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.state.prefix_index import PrefixIndex, key_tokens, length_of, shared_tokens, token_key

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), min_size=1, max_size=6).map(tuple)
NAMESPACES = st.sampled_from(["", "salted"])


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@pytest.mark.parametrize("tokens", [(), (0,), (1, 2, 3), (2**32 - 1, 0, 65536)])
def test_a_key_is_its_tokens(tokens):
    assert key_tokens(token_key(tokens)) == tokens
    assert length_of(token_key(tokens)) == len(tokens)


def test_byte_order_is_token_order():
    lists = [(0,), (0, 5), (1,), (255, 9), (256,), (65536, 0)]
    assert sorted(lists, key=token_key) == sorted(lists)


def test_shared_tokens_counts_whole_tokens():
    assert shared_tokens(token_key((1, 256)), token_key((1, 257))) == 1
    assert shared_tokens(token_key((1, 2)), token_key((1, 2, 3))) == 2
    assert shared_tokens(token_key((7,)), token_key((8,))) == 0


class IndexAgainstSearch(RuleBasedStateMachine):
    """Values are (tokens, whether they can be cut): what cannot be cut serves only whole."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.held = {}

    @rule(namespace=NAMESPACES, tokens=TOKENS, trimmable=st.booleans())
    def put(self, namespace, tokens, trimmable):
        self.index.put(namespace, token_key(tokens), (tokens, trimmable))
        self.held[namespace, tokens] = (tokens, trimmable)

    @rule(data=st.data())
    def remove(self, data):
        if self.held:
            namespace, tokens = data.draw(st.sampled_from(sorted(self.held)))
            self.index.remove(namespace, token_key(tokens))
            del self.held[namespace, tokens]

    @rule(namespace=NAMESPACES, prompt=TOKENS, least=st.integers(0, 3))
    def find(self, namespace, prompt, least):
        def usable(value, shared):
            tokens, trimmable = value
            return shared if shared >= least and (trimmable or shared == len(tokens)) else 0

        found = self.index.longest(namespace, token_key(prompt), usable)
        served = [
            usable(value, common(tokens, prompt)) for (owner, tokens), value in self.held.items() if owner == namespace
        ]
        assert (0 if found is None else found[1]) == max(served, default=0)
        if found is not None:
            assert usable(found[0], common(found[0][0], prompt)) == found[1]

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def relatives(self, namespace, tokens):
        own = [held for owner, held in self.held if owner == namespace]
        above = [value[0] for value in self.index.ancestors(namespace, token_key(tokens))]
        below = [value[0] for value in self.index.descendants(namespace, token_key(tokens))]
        wanted = [held for held in own if len(held) < len(tokens) and tokens[: len(held)] == held]
        assert above == sorted(wanted, key=len, reverse=True)
        assert below == sorted(held for held in own if held[: len(tokens)] == tokens)

    @invariant()
    def holds_what_was_put(self):
        assert len(self.index) == len(self.held)
        for (namespace, tokens), value in self.held.items():
            assert self.index.get(namespace, token_key(tokens)) == value


TestIndexAgainstSearch = IndexAgainstSearch.TestCase
TestIndexAgainstSearch.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_long_prompt_among_many_entries_is_compared_with_few_of_them():
    index, compared = PrefixIndex(), []
    system = tuple(range(500))
    for number in range(300):
        tokens = (*system, number + 1000, *range(200))
        index.put("", token_key(tokens), tokens)

    def usable(value, shared):
        compared.append(value)
        return shared

    found = index.longest("", token_key((*system, 1150, *range(100), 7)), usable)
    assert found is not None
    assert found[1] == 601
    assert len(compared) == 1
