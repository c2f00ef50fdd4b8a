"""GGUF headers: what is read, and what is refused by name, whatever a file claims."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.artifacts.gguf import read_header
from engine.contracts.errors import (
    ArtifactError,
    CorruptArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.artifacts.tiny_files import write_gguf


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def raw_gguf(*, metadata=b"", metadata_count=0, tensors=b"", tensor_count=0, version=3, magic=b"GGUF", data=b""):
    """A file's bytes part by part; `data` starts at the next multiple of 32."""
    head = magic + struct.pack("<IQQ", version, tensor_count, metadata_count) + metadata + tensors
    return head + bytes(-len(head) % 32) + data if data else head


def tensor_info(name=b"x", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header_of(tmp_path, content: bytes):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    return read_header(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_every_kind_of_metadata_is_read_as_it_was_written(tmp_path):
    def extra(writer):
        writer.add_bool("t.flag", True)
        writer.add_int64("t.negative", -7)
        writer.add_float64("t.float", 0.1)
        writer.add_string("t.text", "žluť 𠮷\0")
        writer.add_array("t.texts", ["", "a", "ž"])
        writer.add_array("t.numbers", [3, 1, 2])

    metadata = read_header(write_gguf(tmp_path / "tiny.gguf", extra=extra)).metadata
    assert metadata["general.architecture"] == "llama"
    assert {key: value for key, value in metadata.items() if key.startswith("t.")} == {
        "t.flag": True,
        "t.negative": -7,
        "t.float": 0.1,
        "t.text": "žluť 𠮷\0",
        "t.texts": ("", "a", "ž"),
        "t.numbers": (3, 1, 2),
    }


def test_tensors_have_row_major_shapes_and_true_places(tiny):
    header = read_header(tiny).tensors["blk.1.attn_k.weight"]
    assert (header.dtype, header.shape, header.nbytes) == ("F32", (32, 64), 32 * 64 * 4)
    expected = next(t for t in gguf.GGUFReader(tiny).tensors if t.name == header.name)
    assert header.offset_bytes == expected.data_offset


def test_another_alignment_is_followed(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", extra=lambda writer: writer.add_custom_alignment(256))
    offsets = [header.offset_bytes for header in read_header(path).tensors.values()]
    assert len(offsets) > 1
    assert all(offset % 256 == 0 for offset in offsets)


def test_version_2_is_read(tmp_path):
    content = raw_gguf(version=2, tensors=tensor_info(), tensor_count=1, data=bytes(16))
    assert header_of(tmp_path, content).tensors["x"].shape == (4,)


@pytest.mark.parametrize("size_bytes", [0, 3])
def test_a_file_too_short_for_a_header_is_refused_with_its_size(tmp_path, size_bytes):
    with pytest.raises(CorruptArtifactError, match=f"^tiny.gguf: is {size_bytes} bytes long"):
        header_of(tmp_path, bytes(size_bytes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw_gguf(magic=b"PK\3\4"), "is not a GGUF file"),
        (raw_gguf(version=1), "has GGUF version 1"),
        (raw_gguf(version=4), "has GGUF version 4"),
        (raw_gguf(version=3 << 24), "has the big-endian byte order"),
    ],
)
def test_another_format_is_refused(tmp_path, content, message):
    with pytest.raises(UnsupportedArtifactError, match=message):
        header_of(tmp_path, content)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(MissingArtifactError, match=r"^tiny.gguf: is not there"):
        read_header(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.5, 0.9])
def test_a_cut_file_is_refused_with_its_size(tiny, tmp_path, fraction):
    whole = tiny.read_bytes()
    content = whole[: int(len(whole) * fraction)]
    with pytest.raises(CorruptArtifactError, match=f"is {len(content)} bytes long"):
        header_of(tmp_path, content)


def test_a_file_cut_by_one_byte_names_the_tensor_and_both_ends(tiny, tmp_path):
    last = max(read_header(tiny).tensors.values(), key=lambda header: header.offset_bytes)
    end = last.offset_bytes + last.nbytes
    with pytest.raises(CorruptArtifactError, match=f"is {end - 1} bytes long, tensor '{last.name}' ends at {end}"):
        header_of(tmp_path, tiny.read_bytes()[: end - 1])


HUGE = struct.pack("<Q", 2**63)
CLAIMS = {
    "metadata count": raw_gguf(metadata_count=2**60),
    "tensor count": raw_gguf(tensor_count=2**60),
    "key length": raw_gguf(metadata=HUGE, metadata_count=1),
    "text length": raw_gguf(metadata=text(b"k") + struct.pack("<I", 8) + HUGE, metadata_count=1),
    "texts": raw_gguf(metadata=text(b"k") + struct.pack("<II", 9, 8) + HUGE, metadata_count=1),
    "texts within the limit": raw_gguf(metadata=text(b"k") + struct.pack("<IIQ", 9, 8, 2**20), metadata_count=1),
    "length inside texts": raw_gguf(metadata=text(b"k") + struct.pack("<IIQ", 9, 8, 1) + HUGE, metadata_count=1),
    "numbers": raw_gguf(metadata=text(b"k") + struct.pack("<II", 9, 6) + HUGE, metadata_count=1),
    "numbers within the limit": raw_gguf(metadata=text(b"k") + struct.pack("<IIQ", 9, 6, 2**20), metadata_count=1),
    "tensor name": raw_gguf(tensors=HUGE, tensor_count=1),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_no_claimed_length_is_believed(tmp_path, claim):
    with pytest.raises(CorruptArtifactError, match=r"ends inside its header|at most"):
        header_of(tmp_path, CLAIMS[claim])


FAULTS = {
    "unknown value type": (
        {"metadata": text(b"k") + struct.pack("<I", 77), "metadata_count": 1},
        "'k' the unknown type 77",
    ),
    "not UTF-8": ({"metadata": text(b"k") + struct.pack("<I", 8) + text(b"\xff"), "metadata_count": 1}, "not UTF-8"),
    "key twice": (
        {"metadata": 2 * (text(b"k") + struct.pack("<IB", 7, 1)), "metadata_count": 2},
        "states 'k' twice",
    ),
    "no dimensions": ({"tensors": tensor_info(shape=()), "tensor_count": 1}, "'x' 0 dimensions"),
    "five dimensions": ({"tensors": tensor_info(shape=(1,) * 5), "tensor_count": 1}, "'x' 5 dimensions"),
    "empty dimension": ({"tensors": tensor_info(shape=(4, 0)), "tensor_count": 1}, "no whole F32 blocks"),
    "half a block": ({"tensors": tensor_info(shape=(33,), kind=8), "tensor_count": 1}, "no whole Q8_0 blocks"),
    "huge shape": ({"tensors": tensor_info(shape=(2**62, 2**62)), "tensor_count": 1, "data": bytes(32)}, "'x' ends at"),
    "name twice": (
        {"tensors": tensor_info() + tensor_info(offset=32), "tensor_count": 2, "data": bytes(64)},
        "names tensor 'x' twice",
    ),
    "misaligned": ({"tensors": tensor_info(offset=4), "tensor_count": 1, "data": bytes(64)}, "no multiple of 32"),
    "overlap": (
        {"tensors": tensor_info(shape=(16,)) + tensor_info(b"y", offset=32), "tensor_count": 2, "data": bytes(64)},
        "'y' overlap",
    ),
    "alignment": (
        {"metadata": text(b"general.alignment") + struct.pack("<II", 4, 24), "metadata_count": 1},
        "general.alignment is 24",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, fault):
    parts, message = FAULTS[fault]
    with pytest.raises(CorruptArtifactError, match=message):
        header_of(tmp_path, raw_gguf(**parts))


@pytest.mark.parametrize(("kind", "name"), [(9, "Q8_1"), (15, "Q8_K"), (40, "NVFP4"), (28, "F64"), (99, "number 99")])
def test_an_unread_tensor_type_is_refused_by_name_and_tensor(tmp_path, kind, name):
    content = raw_gguf(tensors=tensor_info(b"blk.0.attn_q.weight", (256,), kind), tensor_count=1, data=bytes(256))
    with pytest.raises(UnsupportedArtifactError, match=f"'blk.0.attn_q.weight' has the type {name}"):
        header_of(tmp_path, content)


def test_arrays_of_arrays_are_refused(tmp_path):
    metadata = text(b"k") + struct.pack("<IIQ", 9, 9, 1)
    with pytest.raises(UnsupportedArtifactError, match="'k' an array of type 9"):
        header_of(tmp_path, raw_gguf(metadata=metadata, metadata_count=1))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_escapes_as_anything_but_our_errors(tiny, tmp_path_factory, data):
    header_bytes = min(header.offset_bytes for header in read_header(tiny).tensors.values())
    whole = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 255]))
    path = tmp_path_factory.mktemp("damaged") / "tiny.gguf"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), header_bytes, header_bytes // 2]))])
    try:
        tensors = read_header(path).tensors
    except ArtifactError as error:
        assert str(error).startswith("tiny.gguf: ")  # noqa: PT017 - harmless damage is not refused
    else:
        assert all(header.offset_bytes + header.nbytes <= path.stat().st_size for header in tensors.values())


def test_a_vocabulary_of_many_texts_keeps_its_order(tmp_path):
    tokens = [f"token {index}" for index in range(20_000)]
    path = write_gguf(tmp_path / "tiny.gguf", extra=lambda writer: writer.add_token_list(tokens))
    assert read_header(path).metadata["tokenizer.ggml.tokens"] == tuple(tokens)


def test_block_sizes_are_those_of_the_reference_package(tmp_path):
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"):
        path = write_gguf(tmp_path / f"{kind}.gguf", kind=kind)
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
        assert {name: header.nbytes for name, header in read_header(path).tensors.items()} == sizes
        assert np.unique(list(sizes.values())).size > 1
