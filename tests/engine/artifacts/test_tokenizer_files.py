"""Tokenizers from a model folder: what is read, and what is said when it cannot be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Pipeline

from engine.artifacts.tokenizer_files import open_tokenizer
from engine.contracts.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from tests.engine.artifacts.tiny_tokenizers import byte_level_pipeline, folder_of, tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_gives_the_tokenizer_that_its_file_describes(tmp_path: Path) -> None:
    pipeline = byte_level_pipeline()
    tokenizer = tokenizer_of(tmp_path, pipeline, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False, parse_special_tokens=True)
    assert ids == pipeline.encode("the lazy dog", add_special_tokens=False).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_without_a_configuration_no_token_has_a_role(tmp_path: Path) -> None:
    byte_level_pipeline().save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.bos_token, tokenizer.eos_token_ids) == (None, "", ())


def test_the_special_tokens_map_speaks_where_the_configuration_is_silent(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_pipeline(), eos_token="<|im_end|>", bos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|end|>"}))
    tokenizer = open_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("bos", [None, "<nowhere>", ""])
def test_a_token_that_the_vocabulary_lacks_has_no_role(tmp_path: Path, bos: Any) -> None:
    assert tokenizer_of(tmp_path, byte_level_pipeline(), bos_token=bos).bos_token_id is None


def test_a_named_token_that_the_vocabulary_lacks_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level_pipeline(), eos_token="<zzz>\nERROR forged", bos_token="<|im_start|>")
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.vocab_size == byte_level_pipeline().get_vocab_size()
    assert tokenizer.control_token_ids == {0, 1, 2}
    assert caplog.messages == [
        r"eos_token is '<zzz>\nERROR forged', which is no token of tokenizer.json: it has no effect"
    ]


@pytest.mark.parametrize("value", [5, True, ["<|im_end|>"], {"content": None}, {}])
@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_named_token_of_another_shape_is_refused_by_file_and_field(
    tmp_path: Path, file: str, name: str, value: Any
) -> None:
    folder_of(tmp_path, byte_level_pipeline())
    (tmp_path / file).write_text(json.dumps({name: value}))
    with pytest.raises(CorruptArtifactError, match=rf"/{file}: {name} must be text, or an object with the text"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<turn>"},
        {"additional_special_tokens": ["<turn>"]},
        {"extra_special_tokens": {"turn_token": "<turn>"}},
        {"added_tokens_decoder": {"400": {"content": "<turn>", "special": True}}},
    ],
)
def test_tokens_that_the_configuration_calls_special_are_control_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    pipeline = byte_level_pipeline()
    pipeline.add_tokens([AddedToken("<turn>", normalized=False), AddedToken("<tool>", normalized=False)])
    turn = pipeline.token_to_id("<turn>")
    tokenizer = tokenizer_of(tmp_path, pipeline, **config)
    assert tokenizer.control_token_ids == {0, 1, 2, turn}
    ids = tokenizer.encode("a<turn><tool>", add_special_tokens=False, parse_special_tokens=False)
    assert turn not in ids
    assert ids[-1] == pipeline.token_to_id("<tool>")
    assert tokenizer.decode(ids) == "a<turn><tool>"


def test_an_ordinary_token_that_is_named_for_padding_keeps_its_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level_pipeline(), pad_token="!")
    ids = tokenizer.encode("a!", add_special_tokens=False, parse_special_tokens=False)
    assert tokenizer.decode(ids) == "a!"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match=rf"^{tmp_path.name}/tokenizer.json: is not there$"):
        open_tokenizer(tmp_path)


def test_a_tokenizer_in_another_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(MissingArtifactError, match=r"tokenizer\.model alone is not read"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": {"type": "Nonsense"}}',
        "\ud83d".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_damaged_file_is_refused_without_the_librarys_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CorruptArtifactError) as caught:
        open_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path.name}/tokenizer.json: is not a tokenizer that can be read"


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level_pipeline())
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ArtifactError, match=rf"^{tmp_path.name}/tokenizer_config\.json: is not JSON"):
        open_tokenizer(folder)


def test_a_decoder_that_has_no_rule_is_refused(tmp_path: Path) -> None:
    pipeline = byte_level_pipeline()
    pipeline.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedArtifactError, match="WordPiece"):
        tokenizer_of(tmp_path, pipeline)


def test_ids_with_holes_between_them_are_all_in_the_vocabulary(tmp_path: Path) -> None:
    pipeline = Pipeline(models.BPE({"a": 0, "b": 2, "c": 7}, []))
    pipeline.decoder = decoders.ByteLevel()
    tokenizer = tokenizer_of(tmp_path, pipeline)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 2, 5, 7]) == "abc"
