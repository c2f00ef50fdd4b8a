"""Streams of text equal one decode of all ids, byte for byte, however the bytes fall into tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from engine.artifacts.detokenizer import ByteLevelRule, PieceRule, StreamingDetokenizer, byte_alphabet, classify_decoder
from engine.artifacts.tokenizer import Tokenizer
from engine.contracts.errors import UnsupportedArtifactError
from tests.engine.artifacts.tiny_tokenizers import (
    SPM_PIECES,
    byte_level,
    byte_level_pipeline,
    spm,
    spm_decoder,
    tokenizer_of,
)

BPE = byte_level()
SPM = spm()
PIPELINE = byte_level_pipeline()
BPE_IDS = st.lists(st.integers(0, BPE.vocab_size - 1), max_size=40)
SPM_IDS = st.lists(st.integers(0, SPM.vocab_size - 1), max_size=40)
MIXED_TEXT = "žluťoučký 𠮷 👩🏽\u200d🚀"


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The deltas of `ids`, the flush last."""
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)


def spm_id(piece: str) -> int:
    return 259 + SPM_PIECES.index(piece)


def byte_id(byte: int) -> int:
    return 3 + byte


@given(BPE_IDS)
def test_joined_deltas_of_any_byte_level_ids_equal_the_librarys_decode(ids: list[int]) -> None:
    assert "".join(stream(BPE, ids)) == BPE.decode(ids) == PIPELINE.decode(ids, skip_special_tokens=True)


@given(SPM_IDS)
def test_joined_deltas_of_any_piece_ids_equal_the_bytes_read_as_utf8(ids: list[int]) -> None:
    joined = b"".join(map(SPM.token_bytes, ids)).removeprefix(b" ")
    assert "".join(stream(SPM, ids)) == SPM.decode(ids) == joined.decode("utf-8", "replace")


@given(st.text(st.sampled_from("abc \u0301é你👩🏽\u200d🚀x"), max_size=30))
def test_piece_ids_of_valid_text_decode_as_the_librarys_chain_does(text: str) -> None:
    ids = ids_of(SPM, text)
    pieces = [f"<0x{token - 3:02X}>" if 3 <= token < 259 else SPM_PIECES[token - 259] for token in ids]
    assert "".join(stream(SPM, ids)) == spm_decoder().decode(pieces) == text


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["byte level", "pieces"])
def test_characters_over_several_tokens_arrive_whole(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, MIXED_TEXT)
    deltas = stream(tokenizer, ids)
    assert any(delta == "" for delta in deltas[:-1])
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == MIXED_TEXT
    assert deltas[-1] == ""


@pytest.mark.parametrize("kept_bytes", [1, 2, 3])
def test_text_cut_inside_a_character_ends_with_one_replacement_character(kept_bytes: int) -> None:
    ids = [byte_id(byte) for byte in "é🚀".encode()[: 2 + kept_bytes]]
    deltas = stream(SPM, ids)
    assert "".join(deltas[:-1]) == "é"
    assert deltas[-1] == "\ufffd"
    assert "".join(deltas) == SPM.decode(ids)


def test_a_second_flush_gives_nothing() -> None:
    detokenizer = SPM.detokenizer()
    detokenizer.push(byte_id(0xF0))
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_an_invalid_byte_is_replaced_as_soon_as_it_is_certain() -> None:
    deltas = stream(SPM, [byte_id(0xE4), spm_id("a"), byte_id(0x80)])
    assert deltas == ["", "\ufffda", "\ufffd", ""]


@pytest.mark.parametrize("text", ["e\u0301x", "'\ufe0f", "\U0001f3f3\ufe0f\u200d\U0001f308"])
def test_a_base_character_is_not_sent_again_when_a_mark_follows(text: str) -> None:
    detokenizer = SPM.detokenizer()
    deltas = ["".join(detokenizer.push(byte_id(byte)) for byte in character.encode()) for character in text]
    assert deltas == list(text)


def test_byte_level_text_keeps_its_leading_space() -> None:
    ids = ids_of(BPE, " leading x")
    assert "".join(stream(BPE, ids)) == BPE.decode(ids) == " leading x"


def test_piece_text_loses_exactly_one_leading_space() -> None:
    ids = [spm_id("\u2581"), spm_id("\u2581leading"), spm_id("\u2581x")]
    assert "".join(stream(SPM, ids)) == SPM.decode(ids) == " leading x"


def test_a_control_token_before_the_first_space_does_not_save_it() -> None:
    assert stream(SPM, [1, spm_id("\u2581x"), 2, spm_id("\u2581x")]) == ["", "x", "", " x", ""]


def test_only_the_start_of_a_text_is_stripped() -> None:
    detokenizer = SPM.detokenizer()
    assert [detokenizer.take(spm_id(piece))[0] for piece in ("\u2581", "x", "\u2581")] == [b"", b"x", b" "]


def test_taken_bytes_join_to_the_bytes_of_the_text() -> None:
    detokenizer = BPE.detokenizer()
    ids = ids_of(BPE, MIXED_TEXT)
    assert b"".join(detokenizer.take(token)[0] for token in ids) == MIXED_TEXT.encode()


def test_ids_without_a_token_contribute_nothing() -> None:
    assert stream(BPE, [BPE.vocab_size, 2**40, -1]) == ["", "", "", ""]


def test_added_tokens_are_written_in_plain_text_by_byte_level_tokenizers(tmp_path: Any) -> None:
    pipeline = byte_level_pipeline()
    pipeline.add_tokens(["ĠĠ<x>", "日本"])
    tokenizer = tokenizer_of(tmp_path, pipeline)
    ids = ids_of(tokenizer, "a日本ĠĠ<x>")
    assert ids[1:] == [tokenizer.vocab_size - 1, tokenizer.vocab_size - 2]
    assert tokenizer.decode(ids) == "a日本ĠĠ<x>"


def test_the_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    valid = {character: byte for character, byte in alphabet.items() if byte < 0x80}
    assert all(decoders.ByteLevel().decode([character]) == chr(byte) for character, byte in valid.items())


def test_a_rule_may_strip_several_marks() -> None:
    rule = PieceRule(stripped=b"_", stripped_count=2)
    texts = {0: b"_", 1: b"", 2: b"__a", 3: b"_b"}
    detokenizer = StreamingDetokenizer(rule, texts.__getitem__)
    assert [detokenizer.push(token) for token in (0, 1, 2, 3)] == ["", "", "_a", "_b"]


def described(decoder: decoders.Decoder) -> Any:
    return json.loads(decoder.__getstate__())  # type: ignore[no-untyped-call, unused-ignore]


def test_a_byte_level_decoder_is_recognised() -> None:
    assert isinstance(classify_decoder(described(decoders.ByteLevel()), file="f"), ByteLevelRule)
    nested = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()])
    assert isinstance(classify_decoder(described(nested), file="f"), ByteLevelRule)


def test_a_piece_decoder_is_recognised_step_by_step() -> None:
    assert classify_decoder(described(spm_decoder()), file="f") == PieceRule(
        replacements=(("\u2581", " "),), byte_fallback=True, stripped=b" ", stripped_count=1
    )
    without_strip = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert classify_decoder(described(without_strip), file="f") == PieceRule(
        replacements=(("\u2581", " "),), byte_fallback=True
    )
    metaspace = decoders.Metaspace(prepend_scheme="never")
    assert classify_decoder(described(metaspace), file="f") == PieceRule(replacements=(("\u2581", " "),))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Metaspace(prepend_scheme="always"), "Metaspace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Fuse > Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip("é", 1, 0)]), "Fuse > Strip"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "Strip > Fuse"),
        (decoders.Sequence([decoders.Replace(Regex("a+"), " "), decoders.Fuse()]), "Replace > Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel > Strip"),
        (decoders.Sequence([]), "Sequence"),
    ],
)
def test_a_decoder_without_an_exact_rule_is_refused_by_name(decoder: decoders.Decoder, named: str) -> None:
    with pytest.raises(UnsupportedArtifactError, match=f"tokenizer.json: tokenizer decoder {named} is not supported"):
        classify_decoder(described(decoder), file="tokenizer.json")


def test_a_tokenizer_without_a_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedArtifactError, match="no decoder"):
        classify_decoder(None, file="tokenizer.json")
