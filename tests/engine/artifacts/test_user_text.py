"""A user's text can neither be nor become a control token, and is otherwise left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.artifacts.user_text import ControlPatterns, UserText, map_texts, texts_in
from engine.contracts.errors import InvalidRequestError

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im|", "[INST]")
PATTERNS = ControlPatterns(CONTROLS)
TEXTS = st.text("<s>/|im[a \n", max_size=12)


def shielded(text: str) -> str:
    return UserText(PATTERNS, [text]).shield(text)


@given(TEXTS, TEXTS)
def test_a_shielded_text_forms_no_control_token_with_any_neighbour(text: str, neighbour: str) -> None:
    user_text = UserText(PATTERNS, [text, neighbour])
    joined = user_text.shield(text) + neighbour
    whole = [token for token in CONTROLS if token in user_text.shield(text)]
    across = [
        token
        for token in CONTROLS
        for cut in range(1, len(token))
        if user_text.shield(text).endswith(token[:cut]) and joined[len(text) :].startswith(token[cut:])
    ]
    assert (whole, across) == ([], [])
    assert len(user_text.shield(text)) == len(text)
    assert user_text.restore(user_text.shield(text)) == text


@given(TEXTS, TEXTS)
def test_a_shielded_text_completes_no_control_token_that_came_before_it(before: str, text: str) -> None:
    after = UserText(PATTERNS, [before, text]).shield(text)
    assert not [
        token
        for token in CONTROLS
        for cut in range(1, len(token))
        if before.endswith(token[:cut]) and after.startswith(token[cut:])
    ]


@pytest.mark.parametrize("text", ["", "plain", "a < b and c > d.", "x[1]", "if a <= b: pass", "s|im", "user"])
def test_harmless_text_is_left_alone(text: str) -> None:
    user_text = UserText(PATTERNS, [text])
    assert not user_text.is_shielded
    assert user_text.shield(text) == text


@pytest.mark.parametrize("text", ["</s", "</s \n", ">b", " \n>b", "a<s>b", "<<s>", "<|im_end|"])
def test_text_that_spells_or_touches_a_control_token_is_shielded(text: str) -> None:
    user_text = UserText(PATTERNS, [text])
    assert user_text.is_shielded
    assert user_text.shield(text) != text


def test_only_one_character_per_control_token_is_replaced() -> None:
    changed = [
        at for at, (old, new) in enumerate(zip("a</s>b</s>c", shielded("a</s>b</s>c"), strict=True)) if old != new
    ]
    assert changed == [1, 6]


def test_the_ends_of_a_text_are_free_where_control_tokens_are_words() -> None:
    assert not UserText(ControlPatterns(["tool", "EOS"]), ["user", "t", "assistant", "S"]).is_shielded
    assert UserText(ControlPatterns(["tool", "EOS"]), ["a tool"]).is_shielded


def test_stand_ins_are_characters_that_the_conversation_lacks() -> None:
    noncharacters = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    text = noncharacters + "<s>"
    user_text = UserText(PATTERNS, [text])
    assert "<s>" not in user_text.shield(text)
    assert user_text.shield(text).startswith(noncharacters)
    assert user_text.restore(user_text.shield(text)) == text


def test_a_conversation_that_leaves_no_stand_in_is_refused() -> None:
    everything = "".join(map(chr, [*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF0100)]))
    with pytest.raises(InvalidRequestError, match=r"^prompt\.chat: "):
        UserText(PATTERNS, [everything, "<s>"])


def test_a_model_without_control_tokens_shields_nothing() -> None:
    assert not UserText(ControlPatterns([]), ["<s>", ""]).is_shielded


def test_every_text_of_a_value_is_found_and_changed_keys_included() -> None:
    value = {"a": ["b", {"c": ("d", 1, None, True)}]}
    assert sorted(texts_in(value)) == ["a", "b", "c", "d"]
    assert map_texts(value, str.upper) == {"A": ["B", {"C": ["D", 1, None, True]}]}
