"""The weights fingerprint: what it depends on, and a memory that can only save time."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from engine.artifacts import identity
from engine.artifacts.identity import weights_fingerprint
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    return [folder / "a.safetensors", folder / "b.safetensors"]


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that are really read, in order."""
    names = []
    genuine = hashlib.file_digest

    def counting(stream, algorithm):
        names.append(Path(stream.name).name)
        return genuine(stream, algorithm)

    monkeypatch.setattr(identity.hashlib, "file_digest", counting)
    return names


def test_the_fingerprint_is_a_sha256_that_depends_on_names_and_bytes_alone(files, tmp_path):
    first = weights_fingerprint(files)
    assert len(first) == 64
    assert int(first, 16) > 0
    assert weights_fingerprint(reversed(files)) == first
    copies = tmp_path / "elsewhere"
    copies.mkdir()
    for file in files:
        (copies / file.name).write_bytes(file.read_bytes())
    assert weights_fingerprint(copies.iterdir()) == first


def test_another_byte_another_name_or_another_file_is_another_fingerprint(files):
    seen = {weights_fingerprint(files), weights_fingerprint(files[:1])}
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")
    seen.add(weights_fingerprint(files))
    renamed = files[1].rename(files[1].with_name("c.safetensors"))
    seen.add(weights_fingerprint([files[0], renamed]))
    assert len(seen) == 4


def test_bytes_that_move_from_one_file_to_the_next_change_the_fingerprint(files):
    first = weights_fingerprint(files)
    content = files[1].read_bytes()
    files[0].write_bytes(files[0].read_bytes() + content[:1])
    files[1].write_bytes(content[1:])
    assert weights_fingerprint(files) != first


def test_files_are_read_once_while_nothing_about_them_changes(files, tmp_path, hashed):
    memory = tmp_path / "memory"
    first = weights_fingerprint(files, memory)
    assert hashed == ["a.safetensors", "b.safetensors"]
    assert weights_fingerprint(files, memory) == first
    assert len(hashed) == 2


def test_a_changed_file_is_read_again_and_the_others_are_not(files, tmp_path, hashed):
    memory = tmp_path / "memory"
    first = weights_fingerprint(files, memory)
    status = files[0].stat()
    files[0].write_bytes(b"A" + files[0].read_bytes()[1:])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_fingerprint(files, memory) != first
    assert hashed == ["a.safetensors", "b.safetensors", "a.safetensors"]


def test_a_link_is_remembered_by_the_file_behind_it(files, tmp_path, hashed):
    memory = tmp_path / "memory"
    link = tmp_path / "a.safetensors"
    link.symlink_to(files[0])
    assert weights_fingerprint([link], memory) == weights_fingerprint(files[:1], memory)
    assert len(hashed) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"sha256": 7}', b"\xff"])
def test_a_damaged_memory_costs_time_alone(files, tmp_path, hashed, damage):
    memory = tmp_path / "memory"
    first = weights_fingerprint(files, memory)
    for entry in memory.iterdir():
        entry.write_bytes(damage)
    assert weights_fingerprint(files, memory) == first
    assert len(hashed) == 4


def test_a_remembered_digest_that_is_no_digest_is_not_believed(files, tmp_path):
    memory = tmp_path / "memory"
    first = weights_fingerprint(files, memory)
    for entry in memory.iterdir():
        entry.write_text(json.dumps(json.loads(entry.read_text()) | {"sha256": "abc"}))
    assert weights_fingerprint(files, memory) == first


def test_a_memory_that_cannot_be_written_costs_time_alone(files, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert weights_fingerprint(files, blocked) == weights_fingerprint(files)
    assert weights_fingerprint(files, blocked / "inside") == weights_fingerprint(files)


def test_no_half_written_entry_stays_behind(files, tmp_path):
    memory = tmp_path / "memory"
    weights_fingerprint(files, memory)
    assert sorted(entry.suffix for entry in memory.iterdir()) == [".json", ".json"]


def test_a_file_that_changes_while_it_is_hashed_is_refused_and_not_remembered(files, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    genuine = hashlib.file_digest

    def growing(stream, algorithm):
        digest = genuine(stream, algorithm)
        files[0].write_bytes(b"grown" * 1000)
        return digest

    monkeypatch.setattr(identity.hashlib, "file_digest", growing)
    with pytest.raises(CorruptArtifactError, match=r"^a.safetensors: changes while it is read"):
        weights_fingerprint(files, memory)
    assert not memory.exists()


def test_a_missing_file_is_named_without_its_folder(files):
    files[1].unlink()
    with pytest.raises(MissingArtifactError, match=r"^b.safetensors: is not there$"):
        weights_fingerprint(files)
