"""Safetensors headers: what is refused, by which name and with which sizes."""

import json
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.artifacts.safetensors import HEADER_LIMIT_BYTES, read_folder, read_header
from engine.contracts.errors import (
    ArtifactError,
    CorruptArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.artifacts.tiny_files import llama_tensors, raw_safetensors, write_index, write_shards

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def header_of(tmp_path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return read_header(path)


@pytest.mark.parametrize("metadata", [5, [], "pt", {"format": 5}, {"format": None}])
def test_metadata_that_other_readers_give_up_on_is_blamed_on_the_header(tmp_path, metadata):
    with pytest.raises(
        CorruptArtifactError, match=r"^model\.safetensors: has a header whose __metadata__ is no object"
    ):
        header_of(tmp_path, raw_safetensors({"__metadata__": metadata} | TWO, bytes(32)))


def test_metadata_of_texts_is_passed_over(tmp_path):
    assert list(header_of(tmp_path, raw_safetensors({"__metadata__": {"format": "pt"}} | TWO, bytes(32)))) == ["a", "b"]


def test_a_header_gives_shapes_types_and_places(tmp_path):
    tensors = header_of(tmp_path, raw_safetensors(TWO, bytes(32)))
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in tensors.values()] == [
        ("a", "F32", (2, 3), 24),
        ("b", "BF16", (4,), 8),
    ]
    assert tensors["b"].offset_bytes - tensors["a"].offset_bytes == 24


def test_a_file_of_the_reference_package_is_read_with_its_metadata(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, path, metadata={"format": "pt"})
    (tensor,) = read_header(path).values()
    at = tensor.offset_bytes
    assert np.frombuffer(path.read_bytes()[at : at + tensor.nbytes], np.float32).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size_bytes", [0, 7])
def test_a_file_too_short_for_a_length_is_refused_with_its_size(tmp_path, size_bytes):
    with pytest.raises(CorruptArtifactError, match=f"^model.safetensors: is {size_bytes} bytes long"):
        header_of(tmp_path, bytes(size_bytes))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10_000])
def test_a_claimed_header_beyond_the_file_is_refused_with_both_sizes(tmp_path, length):
    content = raw_safetensors(TWO, bytes(32), length=length)
    with pytest.raises(CorruptArtifactError, match=f"claims a header of {length} bytes, the file has {len(content)}"):
        header_of(tmp_path, content)


def test_a_header_of_more_than_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", HEADER_LIMIT_BYTES + 1))
        file.truncate(HEADER_LIMIT_BYTES + 100)
    with pytest.raises(CorruptArtifactError, match="at most 100000000 are allowed"):
        read_header(path)


@pytest.mark.parametrize("cut_bytes", [1, 16, 40])
def test_a_cut_file_is_refused_with_its_size_and_what_its_header_describes(tmp_path, cut_bytes):
    content = raw_safetensors(TWO, bytes(32))[:-cut_bytes]
    with pytest.raises(CorruptArtifactError, match=rf"model.safetensors.*{len(content)} bytes"):
        header_of(tmp_path, content)


@pytest.mark.parametrize(
    "header", [b"{", b"\xff\xfe", b"[1, 2]", b"7", b"[" * 100_000, b'{"a": ' * 50_000], ids=lambda header: header[:8]
)
def test_a_header_that_is_no_json_object_is_refused(tmp_path, header):
    with pytest.raises(CorruptArtifactError, match="header that is not"):
        header_of(tmp_path, raw_safetensors(header))


def test_a_name_that_stands_twice_is_refused(tmp_path):
    entry = json.dumps(TWO["a"])
    with pytest.raises(CorruptArtifactError, match="names 'a' twice"):
        header_of(tmp_path, raw_safetensors(f'{{"a": {entry}, "a": {entry}}}'.encode(), bytes(24)))


FAULTS = {
    "overlap": ({"b": TWO["b"] | {"data_offsets": [20, 28]}}, "'b' overlaps"),
    "same place": ({"b": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, "overlaps"),
    "gap": ({"b": TWO["b"] | {"data_offsets": [28, 36]}}, "4 bytes before tensor 'b' belong to no tensor"),
    "negative": ({"a": TWO["a"] | {"data_offsets": [-24, 0]}}, "'a' has no valid data_offsets"),
    "reversed": ({"a": TWO["a"] | {"data_offsets": [24, 0]}}, "'a' has no valid data_offsets"),
    "three offsets": ({"a": TWO["a"] | {"data_offsets": [0, 24, 32]}}, "'a' has no valid data_offsets"),
    "beyond the end": ({"b": TWO["b"] | {"data_offsets": [2**62, 2**62 + 8]}}, "belong to no tensor"),
    "span is not shape": ({"a": TWO["a"] | {"shape": [2, 4]}}, r"'a' spans 24 bytes, F32 \[2, 4\] needs 32"),
    "huge shape": ({"a": TWO["a"] | {"shape": [2**40, 2**40]}}, "'a' spans 24 bytes"),
    "negative shape": ({"a": TWO["a"] | {"shape": [-2, -3]}}, "'a' has no valid shape"),
    "shape of flags": ({"a": TWO["a"] | {"shape": [True, 6]}}, "'a' has no valid shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, "'a' has no valid shape"),
    "no description": ({"a": [0, 24]}, "'a' has no description"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_contradicts_itself_is_refused_by_tensor(tmp_path, fault):
    changes, message = FAULTS[fault]
    with pytest.raises(CorruptArtifactError, match=message):
        header_of(tmp_path, raw_safetensors(TWO | changes, bytes(32)))


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F64", "Q4", None, 7])
def test_an_unknown_dtype_is_refused_with_its_tensor(tmp_path, dtype):
    with pytest.raises(UnsupportedArtifactError, match=rf"'a' has the dtype {re.escape(repr(dtype))}"):
        header_of(tmp_path, raw_safetensors(TWO | {"a": TWO["a"] | {"dtype": dtype}}, bytes(32)))


def test_trailing_bytes_are_refused(tmp_path):
    content = raw_safetensors(TWO, bytes(33))
    with pytest.raises(
        CorruptArtifactError, match=f"{len(content)} bytes long, its header describes {len(content) - 1}"
    ):
        header_of(tmp_path, content)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_escapes_as_anything_but_our_errors(tmp_path_factory, data):
    whole = bytearray(raw_safetensors(TWO, bytes(32)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        tensors = read_header(path)
    except ArtifactError as error:
        assert str(error).startswith("model.safetensors: ")  # noqa: PT017 - harmless damage is not refused
    else:
        assert sum(tensor.nbytes for tensor in tensors.values()) <= path.stat().st_size


def test_shards_together_hold_every_tensor_in_its_file(tmp_path):
    tensors = llama_tensors()
    weight_map = write_shards(tmp_path, tensors)
    assert {name: header.file.name for name, header in read_folder(tmp_path).items()} == weight_map


def test_a_shard_that_is_gone_is_named(tmp_path):
    write_shards(tmp_path, llama_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingArtifactError, match=r"^model-00002-of-00003.safetensors: is not there"):
        read_folder(tmp_path)


def test_a_renamed_shard_is_missed_by_its_old_name(tmp_path):
    write_shards(tmp_path, llama_tensors())
    (tmp_path / "model-00003-of-00003.safetensors").rename(tmp_path / "model-3.safetensors")
    with pytest.raises(MissingArtifactError, match=r"^model-00003-of-00003.safetensors"):
        read_folder(tmp_path)


def test_a_key_that_its_shard_lacks_is_named_with_the_shard(tmp_path):
    weight_map = write_shards(tmp_path, llama_tensors())
    write_index(tmp_path, weight_map | {"model.extra.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(MissingArtifactError, match=r"model-00001-of-00003.*has no tensor 'model.extra.weight'"):
        read_folder(tmp_path)


def test_a_key_that_the_index_moves_to_another_shard_is_refused(tmp_path):
    weight_map = write_shards(tmp_path, llama_tensors())
    name = next(iter(weight_map))
    write_index(tmp_path, weight_map | {name: "model-00002-of-00003.safetensors"})
    with pytest.raises(MissingArtifactError, match=f"has no tensor '{name}'"):
        read_folder(tmp_path)


def test_a_stray_file_beside_the_shards_is_ignored(tmp_path):
    write_shards(tmp_path, llama_tensors())
    save_file({"model.norm.weight": np.zeros((3, 3), np.float32)}, tmp_path / "stray.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert read_folder(tmp_path)["model.norm.weight"].shape == (64,)


def test_a_tensor_that_the_index_forgot_is_kept_for_the_audit(tmp_path):
    weight_map = write_shards(tmp_path, llama_tensors())
    name, _ = weight_map.popitem()
    write_index(tmp_path, weight_map)
    assert name in read_folder(tmp_path)


def test_a_tensor_in_two_shards_without_a_verdict_of_the_index_is_refused(tmp_path):
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"twice": np.zeros(2, np.float32), file: np.zeros(2, np.float32)}, tmp_path / file)
    write_index(tmp_path, {file: file for file in ("a.safetensors", "b.safetensors")})
    with pytest.raises(CorruptArtifactError, match=r"b.safetensors: holds 'twice', as a.safetensors does"):
        read_folder(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, None, [], "x"])
def test_an_index_without_tensors_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(CorruptArtifactError, match=r"^model.safetensors.index.json: names no tensors"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "", "..", "x.bin", 7]
)
def test_an_index_reads_nothing_outside_its_folder(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")
    write_index(folder, {"x": shard})
    with pytest.raises(CorruptArtifactError, match="which is no file name in its folder"):
        read_folder(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(MissingArtifactError, match="holds no weights"):
        read_folder(tmp_path)
