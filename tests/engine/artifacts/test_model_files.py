"""Only regular files are opened, and whatever else has a model file's name is refused at once."""

import os
import socket

import mlx.core as mx
import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.chat_template import open_chat_template
from engine.artifacts.gguf import read_header
from engine.artifacts.gguf_blocks import load_tensor
from engine.artifacts.identity import weights_fingerprint
from engine.artifacts.model_files import open_file, read_file
from engine.artifacts.tokenizer_files import open_tokenizer
from engine.artifacts.weights import WeightStore
from engine.contracts.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from tests.engine.artifacts.tiny_files import write_folder, write_gguf, write_index
from tests.engine.artifacts.tiny_tokenizers import byte_level, byte_level_pipeline, folder_of


def pipe_in_place_of(file):
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    return file


def open_text(folder):
    return open_chat_template(folder, open_tokenizer(folder))


@pytest.fixture
def folder(tmp_path):
    return folder_of(write_folder(tmp_path / "model"), byte_level_pipeline())


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("config.json", open_artifact),
        ("model.safetensors", open_artifact),
        ("model.safetensors.index.json", open_artifact),
        ("generation_config.json", open_artifact),
        ("tokenizer_config.json", open_artifact),
        ("tokenizer.json", open_text),
        ("tokenizer_config.json", open_text),
        ("special_tokens_map.json", open_text),
        ("chat_template.jinja", open_text),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(folder, name, reader):
    pipe_in_place_of(folder / name)
    with pytest.raises(CorruptArtifactError, match=f"^model/{name}: is a pipe, not a regular file$"):
        reader(folder)


def test_a_pipe_in_place_of_a_shard_is_refused_at_once(folder):
    write_index(folder, {"model.norm.weight": "part.safetensors"})
    pipe_in_place_of(folder / "part.safetensors")
    with pytest.raises(CorruptArtifactError, match=r"^model/part.safetensors: is a pipe"):
        open_artifact(folder)


def test_a_pipe_in_place_of_a_gguf_file_is_refused_at_once(tmp_path):
    path = pipe_in_place_of(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedArtifactError, match=r"^tiny\.gguf: is neither a model folder nor a \.gguf file"):
        open_artifact(path)
    with pytest.raises(CorruptArtifactError, match=r"^tiny\.gguf: is a pipe, not a regular file"):
        read_header(path)


def test_a_pipe_that_replaces_a_file_after_it_was_opened_is_refused_at_once(tmp_path):
    model = open_artifact(write_folder(tmp_path / "model"))
    packed = open_artifact(write_gguf(tmp_path / "tiny.gguf", kind="Q4_1"))
    for artifact in (model, packed):
        pipe_in_place_of(artifact.weight_files[0])
    name = "model.embed_tokens.weight"
    for read in (
        lambda: WeightStore(model).take(name),
        lambda: load_tensor(packed.tensors[name], mx.float32),
        lambda: weights_fingerprint(model.weight_files),
    ):
        with pytest.raises(CorruptArtifactError, match="is a pipe, not a regular file"):
            read()


def test_links_are_followed_and_what_they_lead_to_is_judged(folder, tmp_path):
    config = folder / "config.json"
    config.rename(tmp_path / "blob")
    config.symlink_to(tmp_path / "blob")
    assert open_artifact(folder).config.layers == 2
    for target, message in ((tmp_path / "pipe", "is a pipe"), ("/dev/zero", "is a device"), (tmp_path, "is a folder")):
        config.unlink()
        config.symlink_to(target)
        if target == tmp_path / "pipe":
            os.mkfifo(target)
        with pytest.raises(CorruptArtifactError, match=f"^model/config.json: {message}, not a regular file$"):
            open_artifact(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"]
)
def test_a_link_that_leads_nowhere_is_missing_rather_than_passed_over(folder, name, tmp_path):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "gone")
    with pytest.raises(MissingArtifactError, match=f"^model/{name}: is not there$"):
        open_artifact(folder)


def test_a_socket_is_refused_by_its_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("config.json")
        with pytest.raises(CorruptArtifactError, match=r"^config.json: is a socket, not a regular file$"):
            read_file(tmp_path / "config.json", 1)


def test_a_pipe_that_takes_the_place_of_a_file_between_looking_and_opening_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")
    looked = type(path).stat

    def stat_then_replace(self, **options):
        found = looked(self, **options)
        pipe_in_place_of(path)
        return found

    monkeypatch.setattr(type(path), "stat", stat_then_replace)
    with pytest.raises(CorruptArtifactError, match="is a pipe"), open_file(path):
        pass


def test_no_more_than_the_limit_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(CorruptArtifactError, match=r"^file: is larger than the 4 bytes that such a file may have$"):
        read_file(tmp_path / "file", 4)


def test_faults_of_a_folder_are_told_with_its_own_name_and_no_path(folder, tmp_path):
    (folder / "tokenizer_config.json").write_text("{")
    for reader in (open_artifact, open_tokenizer, lambda path: open_chat_template(path, byte_level())):
        with pytest.raises(ArtifactError) as caught:
            reader(folder)
        assert str(caught.value) == "model/tokenizer_config.json: is not JSON"
