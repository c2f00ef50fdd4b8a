"""The model's own list of quantized layers: read when it is there, refused by name when it cannot be understood."""

import json

import pytest

from engine.artifacts.kv_config import read_kv_config
from engine.contracts.errors import ArtifactError
from engine.contracts.kv_scheme import AffineLayer


def written(folder, content):
    (folder / "kv_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_model_without_the_file_says_nothing(tmp_path):
    assert read_kv_config(tmp_path) is None
    assert read_kv_config(tmp_path / "model.gguf") is None


def test_the_list_is_read_beside_a_folder_s_files_and_beside_a_single_file(tmp_path):
    content = [{"layer_idx": 0, "bits": 8, "group_size": 32}, {"layer_idx": 3, "bits": 4, "more": 1}]
    layers = (AffineLayer(layer=0, bits=8, group_size=32), AffineLayer(layer=3, bits=4, group_size=64))
    assert read_kv_config(written(tmp_path, content)) == layers
    assert read_kv_config(tmp_path / "model.gguf") == layers
    assert read_kv_config(written(tmp_path, [])) == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[", "not JSON"),
        ({}, "must hold a JSON list, not an object"),
        ([7], "entry 0 must be an object"),
        ([{"layer_idx": 0}], r"no \[0\]\.bits"),
        ([{"layer_idx": 0, "bits": 5}], r"\[0\]\.bits must be one of \(4, 8\), got 5"),
        ([{"layer_idx": 0, "bits": 4, "group_size": 16}], r"\[0\]\.group_size must be one of"),
        ([{"bits": 4}], r"\[0\]\.layer_idx must be a whole number"),
        ([{"layer_idx": True, "bits": 4}], r"\[0\]\.layer_idx"),
        ([{"layer_idx": -1, "bits": 4}], r"\[0\]\.layer_idx"),
        ([{"layer_idx": 2, "bits": 4}, {"layer_idx": 2, "bits": 8}], "names a layer twice"),
    ],
)
def test_a_list_that_cannot_be_understood_is_refused(tmp_path, content, why):
    with pytest.raises(ArtifactError, match=why):
        read_kv_config(written(tmp_path, content))
