"""Files of kept prefixes: whole or not there, verified to the last bit, and never anybody else's."""

import dataclasses
import fcntl
import json

import mlx.core as mx
import pytest
from safetensors import safe_open

from engine.contracts.errors import ArtifactError, CorruptArtifactError
from engine.contracts.snapshot import LayerSnapshot
from engine.state import state_file
from engine.state.prefix_file import PrefixRecord, read_prefix_file, read_prefix_record, write_prefix_file
from engine.state.prefix_index import token_key
from engine.state.state_arrays import DTYPES, to_device, to_host
from engine.state.state_file import ForeignFileError, remove_if_orphaned

TOKENS = (5, 6, 2**32 - 1, 7)


def layer(dtype=mx.float32, *, least_tokens=0):
    keys = mx.random.normal((1, 2, len(TOKENS), 8), key=mx.random.key(1)).astype(dtype)
    return LayerSnapshot(
        kind="plain",
        tokens=len(TOKENS),
        least_tokens=least_tokens,
        facts={"bits": 8, "mode": "affine"},
        arrays={"keys": keys, "values": keys + 1},
    )


def written(path, layers=None):
    layers = layers or [layer(), layer(mx.bfloat16, least_tokens=2)]
    bare = tuple(dataclasses.replace(one, arrays={}) for one in layers)
    record = PrefixRecord(identity="here", namespace="salt", key=token_key(TOKENS), layers=bare)
    write_prefix_file(path, record, to_host(layers))
    return record, layers


def bits(array):
    return bytes(memoryview(mx.contiguous(array).view(mx.uint8)).cast("B"))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_an_entry_comes_back_bit_for_bit(tmp_path, dtype):
    record, layers = written(tmp_path / "a.safetensors", [layer(dtype), layer(dtype, least_tokens=4)])
    found, tensors = read_prefix_file(tmp_path / "a.safetensors")
    assert found == record
    for before, after in zip(layers, to_device(found.layers, tensors), strict=True):
        assert (after.kind, after.tokens, after.least_tokens) == (before.kind, before.tokens, before.least_tokens)
        assert dict(after.facts) == dict(before.facts)
        assert {name: (array.dtype, array.shape) for name, array in after.arrays.items()} == {
            name: (array.dtype, array.shape) for name, array in before.arrays.items()
        }
        assert [bits(array) for array in after.arrays.values()] == [bits(array) for array in before.arrays.values()]


def test_the_file_is_plain_safetensors_and_nobody_elses_to_read(tmp_path):
    _, layers = written(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as stored:
        assert set(stored.keys()) == {"0.keys", "0.values", "1.keys", "1.values"}
        assert bits(mx.array(stored.get_tensor("0.keys"))) == bits(layers[0].arrays["keys"])
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    written(path)
    whole = path.read_bytes()
    for length in [0, 4, 8, 30, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises((CorruptArtifactError, ForeignFileError)):
            read_prefix_file(path)


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    record, _ = written(path)
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header_bytes, 7), *range(header_bytes, len(whole), 31)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((ArtifactError, ForeignFileError)):
            read_prefix_file(path)
            pytest.fail(f"byte {place}")
    path.write_bytes(whole)
    assert read_prefix_record(path) == record


def test_a_header_that_lies_about_the_tokens_is_noticed_without_reading_the_data(tmp_path):
    path = tmp_path / "a.safetensors"
    written(path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["namespace"] = "pepper"
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + length :])
    with pytest.raises(CorruptArtifactError, match="digest"):
        read_prefix_record(path)


def test_another_programs_file_is_foreign_and_not_damaged(tmp_path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"w": mx.ones((2,))}, {"format": "mlx"})
    with pytest.raises(ForeignFileError):
        read_prefix_record(tmp_path / "model.safetensors")


def test_what_is_gone_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_prefix_record(tmp_path / "a.safetensors")


def test_a_failed_write_leaves_the_old_entry_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    record, _ = written(path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        written(path)
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]
    assert read_prefix_file(path)[0] == record


def test_orphans_go_and_the_files_of_living_writers_stay(tmp_path):
    for name in ("dead.part", "alive.part"):
        (tmp_path / name).write_bytes(b"half")
    with (tmp_path / "alive.part").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in tmp_path.iterdir():
            remove_if_orphaned(path)
        assert [path.name for path in tmp_path.iterdir()] == ["alive.part"]
    remove_if_orphaned(tmp_path / "alive.part")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_file_was_taken_for_an_orphan_makes_another(tmp_path, monkeypatch):
    """Another server may look between the making of a file and its lock."""
    real, taken = fcntl.flock, []

    def lock(file, operation):
        if operation == fcntl.LOCK_EX and len(taken) < 3:
            taken.extend(tmp_path.glob("*.part"))
            with monkeypatch.context() as patched:
                patched.setattr(state_file.fcntl, "flock", real)
                remove_if_orphaned(taken[-1])
        real(file, operation)

    monkeypatch.setattr(state_file.fcntl, "flock", lock)
    record, _ = written(tmp_path / "a.safetensors")
    assert len(taken) == 3
    assert read_prefix_file(tmp_path / "a.safetensors")[0] == record
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
