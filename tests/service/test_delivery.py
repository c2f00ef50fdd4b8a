"""Packing tokens into messages: nothing lost, nothing late, nothing too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.events import TokensGenerated
from engine.contracts.results import GeneratedToken
from service.delivery import ChunkBuffer

EVENTS = st.lists(st.tuples(st.integers(0, 7), st.text("ab", max_size=3), st.floats(0, 2)), max_size=20)


def event(first_index: int, tokens: int, text: str) -> TokensGenerated:
    return TokensGenerated(tuple(GeneratedToken(1, first_index + offset) for offset in range(tokens)), text)


@given(EVENTS, st.integers(1, 5), st.floats(0, 3))
def test_messages_joined_equal_the_events_joined(
    events: list[tuple[int, str, float]], max_tokens: int, delay: float
) -> None:
    buffer = ChunkBuffer(max_tokens=max_tokens, max_delay_seconds=delay)
    sent: list[TokensGenerated] = []
    now, index = 0.0, 0
    for tokens, text, pause in events:
        buffer.add(event(index, tokens, text), now)
        sent += buffer.take(now)
        if buffer.due_at is not None:
            assert now < buffer.due_at <= now + delay
        index += tokens
        now += pause
        sent += buffer.take(now)
    sent += buffer.take(now, everything=True)
    assert [token.index for message in sent for token in message.tokens] == list(range(index))
    assert "".join(message.text for message in sent) == "".join(text for _, text, _ in events)
    assert all(len(message.tokens) <= max_tokens for message in sent)
    assert all(message.tokens or message.text for message in sent)
    assert buffer.due_at is None


def test_without_a_delay_everything_is_sent_at_once() -> None:
    buffer = ChunkBuffer(max_tokens=10, max_delay_seconds=0)
    buffer.add(event(0, 3, "abc"), 5.0)
    assert buffer.due_at == 5.0
    assert buffer.take(5.0) == [event(0, 3, "abc")]


def test_text_travels_with_the_last_token_that_made_it_final() -> None:
    buffer = ChunkBuffer(max_tokens=2, max_delay_seconds=0)
    buffer.add(event(0, 3, "é"), 0.0)
    first, second = buffer.take(0.0)
    assert (len(first.tokens), first.text) == (2, "")
    assert (len(second.tokens), second.text) == (1, "é")


def test_text_without_tokens_joins_the_message_before_it() -> None:
    buffer = ChunkBuffer(max_tokens=1, max_delay_seconds=1)
    buffer.add(event(0, 1, "a"), 0.0)
    buffer.add(event(1, 0, "tail"), 0.0)
    assert buffer.take(0.0, everything=True) == [event(0, 1, "atail")]


def test_nothing_is_made_of_an_empty_event() -> None:
    buffer = ChunkBuffer(max_tokens=1, max_delay_seconds=0)
    buffer.add(TokensGenerated((), ""), 0.0)
    assert buffer.due_at is None
    assert buffer.take(9.0, everything=True) == []
