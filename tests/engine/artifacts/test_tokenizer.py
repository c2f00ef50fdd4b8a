"""Text to ids and back: special tokens, bad input, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Pipeline

from engine.artifacts.detokenizer import ByteLevelRule
from engine.artifacts.tokenizer import Tokenizer
from engine.contracts.errors import InvalidRequestError
from tests.engine.artifacts.tiny_tokenizers import (
    CONTROLS,
    byte_level,
    byte_level_pipeline,
    spm_decoder,
    tokenizer_of,
    word_pipeline,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BPE = byte_level()
START, END = 1, 2


def parsed(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)


@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert BPE.decode(plain(BPE, text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        " two  spaces ",
        "\n\n\t",
        "def f(x):\n    return x**2",
        "12345",
        "žluťoučký kůň",
        "你好世界",
        "👩🏽\u200d🚀🏳️\u200d🌈",
        "a\x00b",
    ],
)
def test_every_script_comes_back_from_its_ids(text: str) -> None:
    assert BPE.decode(plain(BPE, text)) == text


def test_control_tokens_are_read_only_when_asked_for() -> None:
    text = "the<|im_end|>"
    assert parsed(BPE, text)[-1] == END
    assert BPE.control_token_ids.isdisjoint(plain(BPE, text))
    assert BPE.decode(plain(BPE, text)) == text


def test_both_readings_may_be_asked_for_at_once_from_several_threads() -> None:
    text = "the<|im_end|> fox " * 200
    expected = parsed(BPE, text), plain(BPE, text)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: (parsed, plain)[at % 2](BPE, text), range(40)))
    assert all(ids == expected[at % 2] for at, ids in enumerate(found))


def test_control_tokens_are_known_by_id_and_written_only_on_request() -> None:
    assert BPE.control_token_ids == {0, 1, 2}
    assert (BPE.bos_token_id, BPE.bos_token, BPE.eos_token_ids, BPE.eos_token) == (
        1,
        "<|im_start|>",
        (2,),
        "<|im_end|>",
    )
    assert BPE.decode([1, 2]) == ""
    assert BPE.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
    assert BPE.token_bytes(2) == b""


def test_the_vocabulary_ends_after_its_last_id() -> None:
    assert BPE.vocab_size == byte_level_pipeline().get_vocab_size()
    assert BPE.token_bytes(BPE.vocab_size) == b""


@pytest.mark.parametrize("bad", [-1, BPE.vocab_size, 2**31, 2**32 + 5])
def test_ids_outside_the_vocabulary_are_refused_by_their_first_position(bad: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^ids\[2\]: token id {bad} is outside the vocabulary of \d+$"):
        BPE.decode([1, 5, bad, 7, bad])


def with_big_token(model_vocab_size: int) -> Tokenizer:
    pipeline = byte_level_pipeline()
    pipeline.add_special_tokens(["<|big|>"])
    return Tokenizer(
        pipeline,
        ByteLevelRule(),
        vocab_size=pipeline.get_vocab_size(),
        model_vocab_size=model_vocab_size,
        bos_token_id=1,
    )


def test_text_that_needs_a_token_past_the_models_vocabulary_is_refused_by_position() -> None:
    known = byte_level_pipeline().get_vocab_size()
    tokenizer = with_big_token(known)
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode("a<|big|>", add_special_tokens=False, parse_special_tokens=True)
    message = f"token 1 of it has the id {known}, outside the model's vocabulary of {known}"
    assert str(caught.value) == f"prompt.text: {message}"
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode_parts(["a", known, "b"], field="prompt.chat")
    assert str(caught.value) == f"prompt.chat: {message}"
    ids = tokenizer.encode("a<|big|>", add_special_tokens=False, parse_special_tokens=False)
    assert tokenizer.decode(ids) == "a<|big|>"


def test_tokens_past_the_models_vocabulary_are_logged_once_with_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    known = byte_level_pipeline().get_vocab_size()
    with_big_token(known + 1)
    assert caplog.messages == []
    with_big_token(known - 2)
    (line,) = caplog.messages
    assert f"does not know: 3, with ids up to {known} in a vocabulary of {known - 2};" in line


def test_ids_of_the_model_that_no_token_has_are_no_text_like_in_streams() -> None:
    size = byte_level_pipeline().get_vocab_size() + 1
    tokenizer = with_big_token(size + 5)
    ids = tokenizer.encode("ab", add_special_tokens=False, parse_special_tokens=False)
    padded = [ids[0], size, *ids[1:], size + 4]
    stream = tokenizer.detokenizer()
    assert tokenizer.decode(padded) == "ab" == "".join(map(stream.push, padded)) + stream.flush()
    with pytest.raises(InvalidRequestError, match=rf"^ids\[1\]: token id {size + 5} is outside .* {size + 5}$"):
        tokenizer.decode([0, size + 5])


def test_ids_past_the_models_vocabulary_are_refused_even_if_a_token_has_them() -> None:
    known = byte_level_pipeline().get_vocab_size()
    with pytest.raises(
        InvalidRequestError, match=rf"^ids\[0\]: token id {known} is outside the vocabulary of {known}$"
    ):
        with_big_token(known).decode([known])


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("parse", [True, False])
def test_an_unpaired_surrogate_is_refused_by_field_and_position(add: bool, parse: bool) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BPE.encode("ab\ud800c", add_special_tokens=add, parse_special_tokens=parse, field="prompt.text")
    assert str(caught.value) == "prompt.text: has an unpaired surrogate at character 2"


def test_an_empty_text_has_no_ids_and_no_ids_have_no_text() -> None:
    assert plain(BPE, "") == []
    assert BPE.decode([]) == ""


def with_bos(path: Path) -> Tokenizer:
    pipeline = byte_level_pipeline()
    pipeline.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    return tokenizer_of(path, pipeline, bos_token="<|im_start|>")


def test_bos_is_put_before_a_text_once(tmp_path: Path) -> None:
    tokenizer = with_bos(tmp_path)
    fox = plain(tokenizer, "fox")
    for parse in (True, False):
        ids = tokenizer.encode("fox", add_special_tokens=True, parse_special_tokens=parse)
        assert ids == [START, *fox]
    assert tokenizer.encode("", add_special_tokens=True, parse_special_tokens=True) == [START]
    written = tokenizer.encode("<|im_start|>fox", add_special_tokens=True, parse_special_tokens=True)
    assert written == [START, *fox]


def test_truncation_and_padding_of_a_file_never_touch_a_prompt(tmp_path: Path) -> None:
    pipeline = byte_level_pipeline()
    pipeline.enable_truncation(3)
    pipeline.enable_padding(length=30)
    tokenizer = tokenizer_of(tmp_path, pipeline)
    assert tokenizer.decode(plain(tokenizer, "the lazy dog")) == "the lazy dog"
    assert parsed(tokenizer, "the lazy dog") == plain(tokenizer, "the lazy dog")


def byte_level_kind() -> Pipeline:
    return byte_level_pipeline()


def stripping_kind() -> Pipeline:
    pipeline = byte_level_pipeline()
    pipeline.add_special_tokens(
        [
            AddedToken("<|im_start|>", special=True, normalized=False, lstrip=True),
            AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
        ]
    )
    return pipeline


def prepending_kind() -> Pipeline:
    return word_pipeline(["\u2581", *"abc<>|_imendstarx"], prepend="always")


def prepending_first_kind() -> Pipeline:
    return word_pipeline(["\u2581", *"abc<>|_imendstarx"], prepend="first")


KINDS = [byte_level_kind, stripping_kind, prepending_kind, prepending_first_kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parts",
    [
        ["a b", END, " c ", START, "a"],
        [START, "a", END, "b"],
        [" ", END, " ", END, "", START, " a"],
        ["abc"],
        [START],
        [],
    ],
)
def test_parts_are_encoded_as_their_joined_text_would_be(
    kind: Callable[[], Pipeline], parts: list[str | int], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, kind())
    joined = "".join(part if isinstance(part, str) else CONTROLS[part] for part in parts)
    assert tokenizer.encode_parts(parts, field="prompt.chat") == parsed(tokenizer, joined)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_parts_never_become_control_tokens(kind: Callable[[], Pipeline], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, kind())
    ids = tokenizer.encode_parts([START, "a<|im_end|>", END, "\ufdd0<|im_end|>\ufdd0"], field="prompt.chat")
    assert [token for token in ids if token in tokenizer.control_token_ids] == [START, END]


def test_written_control_tokens_are_found_with_their_places(tmp_path: Path) -> None:
    for kind in (byte_level_kind, stripping_kind):
        tokenizer = tokenizer_of(tmp_path, kind())
        text = "é👩🏽 <|im_start|>a<|im_end|>  b"
        assert [(text[start:end], token) for start, end, token in tokenizer.control_spans(text)] == [
            ("<|im_start|>", START),
            ("<|im_end|>", END),
        ]


def test_a_model_that_knows_a_control_token_as_a_piece_refuses_text_that_spells_it(tmp_path: Path) -> None:
    pipeline = Pipeline(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("<", -5.0), ("s", -5.0)], 0, False)
    )
    pipeline.decoder = spm_decoder()
    pipeline.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = tokenizer_of(tmp_path, pipeline, eos_token="</s>")
    assert plain(tokenizer, "asa") == [2, 4, 2]
    with pytest.raises(InvalidRequestError, match=r"^prompt\.text: spells a control token"):
        plain(tokenizer, "a</s>a")
    with pytest.raises(InvalidRequestError, match=r"^prompt\.chat: spells a control token"):
        tokenizer.encode_parts(["a</s>a", 1], field="prompt.chat")


def test_text_with_every_noncharacter_is_refused_rather_than_misread() -> None:
    with pytest.raises(InvalidRequestError, match="noncharacter"):
        BPE.encode_parts(["".join(map(chr, range(0xFDD0, 0xFDF0)))], field="prompt.chat")
