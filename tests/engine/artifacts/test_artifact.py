"""Opening a model from disk: every wrong folder and file has one clear line, without a path."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.fields import CONFIG_LIMIT_BYTES
from engine.contracts.errors import (
    ArtifactError,
    CorruptArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.artifacts.tiny_files import write_folder, write_gguf


def refusal(path, error):
    """The refusal's text, once it is known to name no folder."""
    with pytest.raises(error) as caught:
        open_artifact(path)
    assert str(path.parent) not in str(caught.value)
    return str(caught.value)


def test_a_folder_opens_with_its_text_files(tmp_path):
    folder = write_folder(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text("{}")
    artifact = open_artifact(folder)
    files = artifact.text_files
    assert (artifact.kind, artifact.metadata, artifact.weight_files) == (
        "huggingface",
        {},
        (folder / "model.safetensors",),
    )
    assert (files.tokenizer, files.chat_template) == (folder / "tokenizer.json", folder / "chat_template.jinja")
    assert files.special_tokens_map is None


def test_a_gguf_file_opens_with_its_metadata(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1", extra=lambda w: w.add_token_list(["a", "b"]))
    artifact = open_artifact(path)
    assert (artifact.kind, artifact.text_files.tokenizer, artifact.stored_quantization) == ("gguf", None, "Q4_1")
    assert artifact.metadata["tokenizer.ggml.tokens"] == ("a", "b")


def test_opening_reads_headers_and_never_imports_mlx(tmp_path):
    write_folder(tmp_path / "model")
    write_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from engine.artifacts.artifact import open_artifact\n"
        f"open_artifact(Path({str(tmp_path)!r}, 'model')); open_artifact(Path({str(tmp_path)!r}, 'tiny.gguf'))\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('mlx', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_there_is_said_with_the_last_part_of_the_path(tmp_path):
    assert refusal(tmp_path / "gone", MissingArtifactError) == "gone: no such file or folder"
    assert refusal(tmp_path / "gone.gguf", MissingArtifactError) == "gone.gguf: no such file or folder"


def test_an_empty_folder_is_called_empty(tmp_path):
    (tmp_path / "model").mkdir()
    assert refusal(tmp_path / "model", MissingArtifactError) == "model: is an empty folder"


def test_a_folder_without_a_configuration_says_what_it_could_be(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").unlink()
    assert refusal(folder, MissingArtifactError) == "model: has no config.json"
    write_gguf(folder / "tiny.gguf")
    assert refusal(folder, MissingArtifactError).endswith("to use a GGUF file, name it: tiny.gguf")


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "model"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / name).write_text("hello")
    assert refusal(tmp_path / name, UnsupportedArtifactError) == f"{name}: is neither a model folder nor a .gguf file"


def test_a_gguf_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "tiny.gguf").write_text("hello world")
    assert refusal(tmp_path / "tiny.gguf", UnsupportedArtifactError) == "tiny.gguf: is not a GGUF file"


def test_a_folder_named_like_a_gguf_file_is_a_folder(tmp_path):
    assert open_artifact(write_folder(tmp_path / "odd.gguf")).kind == "huggingface"


CONFIGS = {
    "not JSON": (b"{model", "model/config.json: is not JSON"),
    "cut": (b'{"model_type": "llama"', "model/config.json: is not JSON"),
    "empty": (b"", "model/config.json: is not JSON"),
    "not text": (b"\xff\xfe\x00", "model/config.json: is not JSON"),
    "deep": (b"[" * 100_000, "model/config.json: is not JSON"),
    "list": (b"[]", "model/config.json: must hold a JSON object, not a list"),
    "text": (b'"llama"', "model/config.json: must hold a JSON object, not text"),
    "null": (b"null", "model/config.json: must hold a JSON object, not null"),
    "no type": (b"{}", "model/config.json: has no model_type"),
    "type of another kind": (b'{"model_type": ["llama"]}', "model/config.json: model_type must be text, got ['llama']"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_be_used_is_refused(tmp_path, case):
    content, message = CONFIGS[case]
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    assert refusal(folder, ArtifactError) == message


def test_a_configuration_of_100_megabytes_is_refused_without_being_parsed(tmp_path):
    folder = write_folder(tmp_path / "model")
    with (folder / "config.json").open("wb") as file:
        file.truncate(100_000_000)
    assert refusal(folder, CorruptArtifactError).endswith(
        f"larger than the {CONFIG_LIMIT_BYTES} bytes that such a file may have"
    )


def test_a_configuration_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert refusal(folder, CorruptArtifactError) == "model/config.json: is a folder, not a regular file"


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_damaged_neighbour_of_the_configuration_is_named(tmp_path, name):
    folder = write_folder(tmp_path / "model")
    (folder / name).write_text("{")
    assert refusal(folder, CorruptArtifactError) == f"model/{name}: is not JSON"


def test_a_configuration_without_weights_is_refused(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert refusal(folder, MissingArtifactError).startswith("model: holds no weights")


def test_a_vocabulary_that_is_not_the_stored_one_is_refused_with_both_shapes(tmp_path):
    folder = write_folder(tmp_path / "model", config={"vocab_size": 50})
    text = refusal(folder, CorruptArtifactError)
    assert text == (
        "model/model.safetensors: model.embed_tokens.weight has the shape [48, 64], the configuration needs [50, 64]"
    )


def test_missing_tensors_are_listed_up_to_twelve(tmp_path):
    folder = write_folder(tmp_path / "model", config={"num_hidden_layers": 4})
    text = refusal(folder, MissingArtifactError)
    assert text.startswith("model: has no model.layers.2.input_layernorm.weight, ")
    assert text.count("model.layers.") == 12
    assert text.endswith(" and 6 more")


def test_a_name_that_no_file_system_takes_is_refused(tmp_path):
    assert refusal(tmp_path / ("x" * 5000), CorruptArtifactError).endswith("cannot be read (File name too long)")
    assert "no such file" in refusal(tmp_path / "a\0b", MissingArtifactError)


def test_relative_paths_have_a_name_too(tmp_path, monkeypatch):
    monkeypatch.chdir(write_folder(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(MissingArtifactError, match=r"^model: holds no weights"):
        open_artifact(Path())
