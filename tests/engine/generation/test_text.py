"""One row's text: detokenizer and stop rule together."""

from __future__ import annotations

import pytest

from engine.generation.text import TextAssembler
from tests.engine.artifacts.tiny_tokenizers import byte_level, spm

BPE = byte_level()
SPM = spm()


def ids_of(text: str) -> list[int]:
    return BPE.encode(text, add_special_tokens=False, parse_special_tokens=False)


def byte_id(byte: int) -> int:
    return 3 + byte


@pytest.mark.parametrize(
    ("stops", "before", "met"),
    [
        (["green blue"], "red ", "green blue"),
        (["en bl"], "red gre", "en bl"),
        (["blue"], "red green ", "blue"),
        (["ue bla", "blue"], "red green ", "blue"),
    ],
)
def test_the_text_ends_before_the_stop_even_inside_a_token(stops: list[str], before: str, met: str) -> None:
    assembler, text, matched = TextAssembler(BPE, stops), "", None
    for token in ids_of("red green blue black"):
        pushed = assembler.push(token)
        text += pushed.text
        matched = pushed.matched_stop
        if matched is not None:
            break
    assert (text + assembler.finish(), matched) == (before, met)


def test_tokens_after_a_match_are_no_text() -> None:
    assembler = TextAssembler(BPE, ["red"])
    pushed = [assembler.push(token) for token in ids_of("red green")]
    assert "".join(push.text for push in pushed) + assembler.finish() == ""
    assert pushed[-1].matched_stop == "red"


def test_without_stops_every_token_sends_its_characters_at_once() -> None:
    assembler = TextAssembler(BPE, [])
    ids = ids_of("red green 👩🏽\u200d🚀")
    pushed = [assembler.push(token) for token in ids]
    assert [push.text for push in pushed[:2]] == [BPE.decode([token]) for token in ids[:2]]
    assert "".join(push.text for push in pushed) == "red green 👩🏽\u200d🚀"
    assert assembler.finish() == ""


def test_bytes_of_every_token_join_to_the_text_that_was_generated() -> None:
    assembler = TextAssembler(BPE, ["green"])
    pushed = [assembler.push(token) for token in ids_of("red green é")]
    assert b"".join(push.token_bytes for push in pushed) == "red green é".encode()


def test_the_end_releases_held_text_and_then_the_unfinished_character() -> None:
    assembler = TextAssembler(SPM, ["abX"])
    pushed = [assembler.push(byte_id(byte)) for byte in b"cab\xf0\x9f"]
    assert [push.text for push in pushed] == ["c", "", "", "", ""]
    assert assembler.finish() == "ab\ufffd"
    assert assembler.finish() == ""


@pytest.mark.parametrize(("stop", "before"), [("\ufffd", "ab"), ("b\ufffd", "a")])
def test_a_stop_that_only_the_unfinished_character_completes_is_reported(stop: str, before: str) -> None:
    assembler = TextAssembler(SPM, [stop])
    pushed = [assembler.push(byte_id(byte)) for byte in b"ab\xf0"]
    assert [push.matched_stop for push in pushed] == [None] * 3
    assert assembler.matched_stop is None
    assert "".join(push.text for push in pushed) + assembler.finish() == before
    assert assembler.matched_stop == stop


def test_a_stop_before_an_unfinished_character_leaves_nothing_of_it() -> None:
    assembler = TextAssembler(SPM, ["b"])
    pushed = [assembler.push(byte_id(byte)) for byte in b"ab\xf0"]
    assert [(push.text, push.matched_stop) for push in pushed] == [("a", None), ("", "b"), ("", "b")]
    assert assembler.finish() == ""


def test_a_stop_of_half_an_emojis_bytes_is_met_when_the_emoji_is_whole() -> None:
    assembler = TextAssembler(SPM, ["👩"])
    pushed = [assembler.push(byte_id(byte)) for byte in "x👩".encode()]
    assert "".join(push.text for push in pushed) == "x"
    assert [push.matched_stop for push in pushed] == [None, None, None, None, "👩"]


def test_the_text_of_a_control_token_is_never_shown() -> None:
    assembler = TextAssembler(BPE, ["<|im_end|>"])
    pushed = [assembler.push(token) for token in [*ids_of("red"), 2]]
    assert "".join(push.text for push in pushed) + assembler.finish() == "red"
    assert pushed[-1].matched_stop is None
