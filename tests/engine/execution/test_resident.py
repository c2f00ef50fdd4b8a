"""The text half of a model: the tokenizer learns how many ids the model has, whatever files both come from."""

import json

import pytest

from engine.contracts.errors import InvalidRequestError
from engine.execution.resident import EngineSettings, find_files
from engine.execution.text_model import open_text_model
from tests.engine import tiny_model
from tests.engine.artifacts.tiny_files import write_gguf
from tests.engine.artifacts.tiny_tokenizers import byte_level_metadata, byte_level_pipeline


def text_model(path, tmp_path):
    return open_text_model(find_files(EngineSettings(model=str(path), state_dir=tmp_path / "state")).artifact)


def test_a_token_past_the_embeddings_is_logged_at_load_and_refused_in_text(tmp_path, caplog):
    folder = tmp_path / "model"
    tiny_model.write(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append(document["added_tokens"][-1] | {"id": 99999, "content": "<|big|>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = text_model(folder, tmp_path).tokenizer
    assert len([line for line in caplog.messages if "does not know: 1, with" in line]) == 1
    with pytest.raises(InvalidRequestError, match=r"^prompt\.text: token 1 of it has the id \d+, outside .* of 259$"):
        tokenizer.encode("a<|big|>", add_special_tokens=False, parse_special_tokens=True)


def test_padded_embeddings_have_ids_without_text(tmp_path):
    folder = tmp_path / "model"
    tiny_model.write(folder, vocab_size=tiny_model.VOCAB + 5)
    assert text_model(folder, tmp_path).tokenizer.decode([64, tiny_model.VOCAB + 4]) != ""


def test_a_gguf_files_tokenizer_learns_the_size_of_the_embeddings_too(tmp_path):
    metadata = byte_level_metadata(byte_level_pipeline())
    names = ("model", "pre", "tokens", "token_type", "merges")

    def with_tokenizer(writer):
        for name in names:
            value = metadata[f"tokenizer.ggml.{name}"]
            add = writer.add_string if isinstance(value, str) else writer.add_array
            add(f"tokenizer.ggml.{name}", value)

    tokenizer = text_model(write_gguf(tmp_path / "tiny.gguf", extra=with_tokenizer), tmp_path).tokenizer
    assert (tokenizer.model_vocab_size, tokenizer.vocab_size) == (48, len(metadata["tokenizer.ggml.tokens"]))
