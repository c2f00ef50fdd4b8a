"""Tokenizers from GGUF metadata equal the naive algorithms, and everything missing or unknown is named."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.artifacts.detokenizer import byte_alphabet
from engine.artifacts.tokenizer import Tokenizer
from engine.artifacts.tokenizer_gguf import tokenizer_from_gguf
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from tests.engine.artifacts.tiny_tokenizers import (
    CORPUS,
    FILE,
    SPM_PIECES,
    byte_level_metadata,
    byte_level_pipeline,
    spm_metadata,
)

PIPELINE = byte_level_pipeline()
MERGES = [tuple(pair) for pair in json.loads(PIPELINE.to_str())["model"]["merges"]]
DIGIT_MERGES = ["1 2", "12 3", "123 4", "1234 5"]
CHARACTER_OF = {byte: character for character, byte in byte_alphabet().items()}


def built(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata, file=FILE)


BYTE_LEVEL = built(byte_level_metadata(PIPELINE))
SENTENCEPIECE = built(spm_metadata())


def ids_of(tokenizer: Tokenizer, text: str, *, add: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=add, parse_special_tokens=True)


def naive_merges(word: str) -> list[str]:
    """Byte-level BPE of one word: the first merge of the list that applies, leftmost, until none does."""
    pieces = [CHARACTER_OF[byte] for byte in word.encode()]
    while True:
        pairs = list(pairwise(pieces))
        pair = next((pair for pair in MERGES if pair in pairs), None)
        if pair is None:
            return pieces
        at = pairs.index(pair)
        pieces[at : at + 2] = ["".join(pair)]


@pytest.mark.parametrize(
    "words",
    [
        ["the", " quick", " fox"],
        ["don", "'t", " jump", "!?", " ", " 你好"],
        ["123", "abc", " 12", "   ", " x", "\n\n"],
        ["žluťoučký", " kůň", ",", " 👩🏽\u200d🚀"],
    ],
)
def test_byte_level_ids_equal_naive_merges_of_each_word(words: list[str]) -> None:
    expected = [PIPELINE.token_to_id(piece) for word in words for piece in naive_merges(word)]
    assert ids_of(built(byte_level_metadata(PIPELINE)), "".join(words)) == expected


@given(st.one_of(st.sampled_from(CORPUS), st.text(max_size=40)))
def test_byte_level_ids_equal_those_of_the_pipeline_that_the_metadata_describes(text: str) -> None:
    assert ids_of(BYTE_LEVEL, text) == PIPELINE.encode(text, add_special_tokens=False).ids


def with_digit_merges(pre: str) -> Tokenizer:
    """Digits that would merge as far as the cut allows."""
    alphabet = sorted(byte_alphabet())
    tokens = [*alphabet, "12", "123", "1234", "12345"]
    return built(
        byte_level_metadata(
            PIPELINE, pre=pre, tokens=tokens, token_type=None, merges=DIGIT_MERGES, bos_token_id=None, eos_token_id=None
        )
    )


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in ids_of(tokenizer, text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12345", "1"]),
        ("default", ["12345", "1"]),
        ("smollm", ["1", "2", "3", "4", "5", "1"]),
        ("starcoder", ["1", "2", "3", "4", "5", "1"]),
        ("refact", ["1", "2", "3", "4", "5", "1"]),
        ("llama-bpe", ["123", "4", "5", "1"]),
        ("llama3", ["123", "4", "5", "1"]),
        ("llama-v3", ["123", "4", "5", "1"]),
        ("qwen2", ["1", "2", "3", "4", "5", "1"]),
    ],
)
def test_numbers_are_cut_as_the_family_cuts_them(pre: str, expected: list[str]) -> None:
    assert pieces(with_digit_merges(pre), "123451") == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["don", "'t", " stop", " .", "\n\n", " go", "  ", " x", "\n\n"]),
        ("smollm", ["don", "'t", " stop", " .", "\n\n", " go", "  ", " x", "\n\n"]),
        ("llama-bpe", ["don", "'t", " stop", " .\n\n", " go", "  ", " x", "\n\n"]),
        ("qwen2", ["don", "'t", " stop", " .\n\n", " go", "  ", " x", "\n\n"]),
    ],
)
def test_words_are_cut_as_the_family_cuts_them(pre: str, words: list[str]) -> None:
    written = {word: "".join(CHARACTER_OF[byte] for byte in word.encode()) for word in words}
    tokens, merges = sorted(byte_alphabet()), []
    for word in dict.fromkeys(written.values()):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    text = "".join(words)
    tokenizer = built(
        byte_level_metadata(
            PIPELINE, pre=pre, tokens=tokens, token_type=None, merges=merges, bos_token_id=None, eos_token_id=None
        )
    )
    assert pieces(tokenizer, text) == words


def test_qwen2_composes_characters_first() -> None:
    assert ids_of(with_digit_merges("qwen2"), "e\u0301") == ids_of(with_digit_merges("qwen2"), "é")
    assert ids_of(with_digit_merges("gpt-2"), "e\u0301") != ids_of(with_digit_merges("gpt-2"), "é")


def test_llama3_takes_a_whole_word_of_the_vocabulary_before_any_merge() -> None:
    tokens = [*sorted(byte_alphabet()), "word"]
    changes = {"tokens": tokens, "token_type": None, "merges": ["w o"], "bos_token_id": None, "eos_token_id": None}
    with pytest.raises(CorruptArtifactError):
        built(byte_level_metadata(PIPELINE, pre="llama-bpe", **changes))
    tokens.append("wo")
    assert pieces(built(byte_level_metadata(PIPELINE, pre="llama-bpe", **changes)), "word") == ["word"]
    assert pieces(built(byte_level_metadata(PIPELINE, pre="gpt-2", **changes)), "word") == ["wo", "r", "d"]


def naive_sentencepiece(text: str) -> list[str]:
    """Join the neighbours whose result has the best score, leftmost first, until none is a piece."""
    best = {piece: at for at, piece in enumerate(SPM_PIECES)}
    found = list(("\u2581" + text).replace(" ", "\u2581")) if text else []
    while True:
        joined = [(best[left + right], at) for at, (left, right) in enumerate(pairwise(found)) if left + right in best]
        if not joined:
            return found
        at = min(joined)[1]
        found[at : at + 2] = [found[at] + found[at + 1]]


@given(st.text(st.sampled_from("aaabc  leading"), max_size=40))
def test_sentencepiece_ids_equal_naive_joins_by_score(text: str) -> None:
    assert ids_of(SENTENCEPIECE, text) == [259 + SPM_PIECES.index(piece) for piece in naive_sentencepiece(text)]


@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=30))
def test_sentencepiece_text_comes_back_through_byte_tokens(text: str) -> None:
    assert SENTENCEPIECE.decode(ids_of(SENTENCEPIECE, text)) == text


def test_sentencepiece_puts_bos_first_and_a_space_before_the_text_unless_told_otherwise() -> None:
    assert ids_of(SENTENCEPIECE, "a", add=True) == [1, 259 + SPM_PIECES.index("\u2581a")]
    bare = built(spm_metadata(add_bos_token=False, add_space_prefix=False, add_eos_token=True))
    assert ids_of(bare, "a", add=True) == [259 + SPM_PIECES.index("a"), 2]
    assert bare.decode(ids_of(bare, " a")) == " a"


def test_byte_level_files_put_bos_first_only_when_they_say_so() -> None:
    fox = ids_of(BYTE_LEVEL, "fox")
    assert ids_of(BYTE_LEVEL, "fox", add=True) == fox
    told = built(byte_level_metadata(PIPELINE, add_bos_token=True, add_eos_token=True))
    assert ids_of(told, "fox", add=True) == [1, *fox, 2]
    llama3 = built(byte_level_metadata(PIPELINE, pre="llama-bpe"))
    assert ids_of(llama3, "fox", add=True)[0] == 1
    assert ids_of(built(byte_level_metadata(PIPELINE, pre="llama-bpe", add_bos_token=False)), "fox", add=True)[0] != 1


def test_every_end_that_the_file_names_is_kept_once_and_in_order() -> None:
    tokenizer = built(byte_level_metadata(PIPELINE, eos_token_id=2, eot_token_id=0, eom_token_id=2))
    assert tokenizer.eos_token_ids == (2, 0)


def test_named_ends_are_control_tokens_even_where_types_are_not_stored() -> None:
    tokenizer = built(byte_level_metadata(PIPELINE, token_type=None))
    assert tokenizer.control_token_ids == {1, 2}
    assert ids_of(tokenizer, "<|im_end|>") == [2]


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_control_token_with_a_space_mark_is_found_exactly_as_it_is_written(add_space_prefix: bool) -> None:
    metadata = spm_metadata(add_space_prefix=add_space_prefix)
    for key, value in (("tokens", "\u2581<PRE>"), ("token_type", 3), ("scores", 0.0)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    tokenizer = built(metadata)
    control = tokenizer.vocab_size - 1
    for text, found in (("a\u2581<PRE>a", 1), ("\u2581<PRE>\u2581<PRE>", 2), ("a <PRE>a", 0), ("<PRE>", 0)):
        assert ids_of(tokenizer, text).count(control) == found
        assert control not in tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert tokenizer.encode_parts(["a ", control, "a"], field="prompt.chat").count(control) == 1


def test_user_defined_tokens_are_found_whole_and_keep_their_text() -> None:
    metadata = byte_level_metadata(PIPELINE)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = built(metadata)
    ids = tokenizer.encode("a<tool>", add_special_tokens=False, parse_special_tokens=False)
    assert ids[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "a<tool>"


@pytest.mark.parametrize("key", ["model", "tokens", "merges", "pre"])
def test_a_missing_part_of_a_byte_level_tokenizer_is_named(key: str) -> None:
    with pytest.raises(MissingArtifactError, match=rf"^tiny.gguf: has no tokenizer.ggml.{key}\b"):
        built(byte_level_metadata(PIPELINE, **{key: None}))


@pytest.mark.parametrize("key", ["tokens", "scores"])
def test_a_missing_part_of_a_sentencepiece_tokenizer_is_named(key: str) -> None:
    with pytest.raises(MissingArtifactError, match=rf"^tiny.gguf: has .*tokenizer.ggml.{key}\b"):
        built(spm_metadata(**{key: None}))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (byte_level_metadata(PIPELINE, model="rwkv"), "model 'rwkv'"),
        (byte_level_metadata(PIPELINE, model="t5"), "model 't5'"),
        (byte_level_metadata(PIPELINE, pre="deepseek-v3"), "pre 'deepseek-v3'"),
        (spm_metadata(precompiled_charsmap=(1, 2)), "precompiled_charsmap"),
        (spm_metadata(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArtifactError, match=f"tokenizer.ggml.{named} is not supported"):
        built(metadata)


def test_user_defined_spaces_are_refused_where_a_space_is_put_first() -> None:
    types = list(spm_metadata()["tokenizer.ggml.token_type"])
    types[259 + SPM_PIECES.index("\u2581\u2581")] = 4
    with pytest.raises(UnsupportedArtifactError, match="user-defined tokens with spaces"):
        built(spm_metadata(token_type=types))
    tokenizer = built(spm_metadata(token_type=types, add_space_prefix=False))
    assert tokenizer.decode(ids_of(tokenizer, "a  b")) == "a  b"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["a \u4f60"]}, "merges"),
        ({"token_type": [1]}, "token_type must hold"),
        ({"tokens": 7}, "tokens must be a list of texts"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "the token of id 0 twice"),
        ({"bos_token_id": 10**6}, "bos_token_id must be one of"),
        ({"eos_token_id": -1}, "eos_token_id must be"),
    ],
)
def test_values_that_contradict_each_other_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptArtifactError, match=named):
        built(byte_level_metadata(PIPELINE, **changes))
