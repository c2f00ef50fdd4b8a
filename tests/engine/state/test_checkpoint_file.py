"""Checkpoints as files: pieces that add up, and damage of any class in any place that never goes unnoticed."""

import json
import shutil

import mlx.core as mx
import pytest

from engine.contracts.errors import ArtifactError
from engine.state import checkpoint_file
from engine.state.checkpoint_file import head_name, read_checkpoint, write_checkpoint
from engine.state.durable_generation import StoredState
from engine.state.state_file import FileFormat, ForeignFileError
from tests.engine.state.checkpoint_states import GENERATION, added, facts, hosted, layers, whole

DAMAGE = (ArtifactError, ForeignFileError, OSError)


def written(folder, steps=((0, 6), (6, 9), (9, 12))):
    before, heads = (), []
    for start, tokens in steps:
        head = write_checkpoint(folder, GENERATION, facts(tokens), hosted(layers(start, tokens)), before)
        before = head.pieces
        heads.append(head)
    return heads


def read(folder, tokens):
    said, head, stored = read_checkpoint(folder, head_name(tokens), GENERATION)
    return said, head, StoredState(tokens, stored).take_snapshots()


def assert_state(snapshots, tokens):
    for layer, snapshot in zip((0, None, 2), snapshots, strict=True):
        wanted = whole(tokens) if layer is None else added(0, tokens, layer)
        assert (snapshot.start, snapshot.tokens, snapshot.kind) == (0, tokens, wanted.kind)
        for name, array in wanted.arrays.items():
            assert mx.array_equal(snapshot.arrays[name], array).item()


def test_every_checkpoint_is_the_sum_of_its_pieces(tmp_path):
    heads = written(tmp_path)
    for tokens, head in zip((6, 9, 12), heads, strict=True):
        said, found, snapshots = read(tmp_path, tokens)
        assert said == facts(tokens)
        assert found == head
        assert_state(snapshots, tokens)
    assert [len(head.pieces) for head in heads] == [1, 2, 3]
    assert heads[-1].kinds == {0: "plain", 2: "plain"}


def test_a_whole_state_needs_nothing_older(tmp_path):
    heads = written(tmp_path, ((0, 6), (6, 9), (0, 12)))
    assert heads[-1].files == {"checkpoint-0000000012.safetensors", "checkpoint-0000000012-added.safetensors"}
    assert_state(read(tmp_path, 12)[2], 12)


def test_layers_that_begin_anew_keep_the_others_pieces(tmp_path):
    """As when one layer is quantized later than another."""
    first = write_checkpoint(tmp_path, GENERATION, facts(6), hosted([added(0, 6, 0), added(0, 6, 1)]), ())
    second = write_checkpoint(tmp_path, GENERATION, facts(9), hosted([added(6, 9, 0), added(0, 9, 1)]), first.pieces)
    third = write_checkpoint(tmp_path, GENERATION, facts(12), hosted([added(9, 12, 0), added(9, 12, 1)]), second.pieces)
    assert len(third.pieces) == 3
    for layer, snapshot in enumerate(read(tmp_path, 12)[2]):
        assert mx.array_equal(snapshot.arrays["keys"], added(0, 12, layer).arrays["keys"]).item()


def test_a_state_without_rows_of_tokens_is_one_file(tmp_path):
    head = write_checkpoint(tmp_path, GENERATION, facts(6), hosted([whole(6), whole(6)]), ())
    assert head.files == {head.name} == {path.name for path in tmp_path.iterdir()}
    assert len(read(tmp_path, 6)[2]) == 2


def test_what_adds_to_nothing_is_not_written_as_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="add to what is not there"):
        write_checkpoint(tmp_path, GENERATION, facts(9), hosted([added(6, 9)]), ())
    assert not (tmp_path / head_name(9)).exists()


def places(length, header_bytes):
    """Where to damage a file: each of its classes of bytes, from both ends of each."""
    spots = {"length": (0, 8), "beginning": (8, 60), "header": (60, header_bytes), "data": (header_bytes, length)}
    return {name: sorted({a, a + 1, (a + b) // 2, b - 1}) for name, (a, b) in spots.items() if b > a}


def header_end(content):
    return 8 + int.from_bytes(content[:8], "little")


def damages(content):
    """One of each kind at each place."""
    end = header_end(content)
    for name, spots in places(len(content), end).items():
        for spot in spots:
            yield f"flip in {name}", _flipped(content, spot)
            yield f"cut in {name}", content[:spot]
            size = min(16, len(content) - spot)
            zeroed = content[:spot] + bytes(size) + content[spot + size :]
            if zeroed != content:
                yield f"zeros in {name}", zeroed
    yield "longer", content + b"\0"
    yield "all zeros", bytes(len(content))
    yield "empty", b""


def _flipped(content, spot):
    changed = bytearray(content)
    changed[spot] ^= 0x10
    return bytes(changed)


def test_damage_of_any_class_to_any_file_is_noticed(tmp_path):
    """Field report 75."""
    written(tmp_path)
    tried = set()
    for path in sorted(tmp_path.iterdir()):
        if path.name in (head_name(6), head_name(9)):
            continue
        content = path.read_bytes()
        for kind, damaged in damages(content):
            path.write_bytes(damaged)
            with pytest.raises(DAMAGE):
                read(tmp_path, 12)
                pytest.fail(f"{kind} of {path.name}")
            tried.add(kind)
        path.write_bytes(content)
        assert_state(read(tmp_path, 12)[2], 12)
    assert len(tried) == 15


def test_every_flipped_bit_of_a_head_is_noticed(tmp_path):
    written(tmp_path, ((0, 6),))
    path = tmp_path / head_name(6)
    content = path.read_bytes()
    for place in range(0, len(content), 5):
        path.write_bytes(_flipped(content, place))
        with pytest.raises(DAMAGE):
            read(tmp_path, 6)
            pytest.fail(f"byte {place}")


def test_files_that_were_swapped_are_noticed(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        written(folder)
    other = "f" * 32
    write_checkpoint(there, other, facts(12), hosted(layers(0, 12)), ())
    names = sorted(path.name for path in here.iterdir())
    needed = [name for name in names if name not in (head_name(6), head_name(9))]
    for name in needed:
        for source in [*(here / one for one in names if one != name), there / head_name(12)]:
            content = (here / name).read_bytes()
            if source.read_bytes() == content:
                continue
            (here / name).write_bytes(source.read_bytes())
            with pytest.raises(DAMAGE):
                read(here, 12)
                pytest.fail(f"{source.name} for {name}")
            (here / name).write_bytes(content)
    assert_state(read(here, 12)[2], 12)


def test_a_piece_that_is_gone_is_noticed(tmp_path):
    heads = written(tmp_path)
    for piece in heads[-1].pieces:
        shutil.move(tmp_path / piece.name, tmp_path / "away")
        with pytest.raises(DAMAGE):
            read(tmp_path, 12)
        shutil.move(tmp_path / "away", tmp_path / piece.name)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "checkpoint-0000000006.safetensors", "a\0b", ""])
def test_a_head_that_names_something_else_as_its_piece_is_not_followed(tmp_path, monkeypatch, name):
    """Field report 75: an index that points to "../"."""
    said = checkpoint_file._said
    monkeypatch.setattr(
        checkpoint_file, "_said", lambda *given: said(*given) | {"pieces": json.dumps([[name, "0" * 64]])}
    )
    written(tmp_path, ((0, 6),))
    with pytest.raises(ArtifactError, match="no name of a piece"):
        read(tmp_path, 6)


@pytest.mark.parametrize(
    "said",
    [
        {"pieces": "5"},
        {"pieces": "[[1]]"},
        {"pieces": "{"},
        {"identity": "{}"},
        {"identity": "[]"},
        {"tokens": "!"},
        {"tokens": "AAA="},
        {"prompt_tokens": "x"},
        {"seed": ""},
        {"state_layers": "many"},
        {"state_layers": "4"},
        {"places": "[9]"},
        {"places": "[]"},
        {"places": '["a"]'},
        {"places": "7"},
    ],
)
def test_a_head_that_says_what_cannot_be_is_damaged(tmp_path, monkeypatch, said):
    """Digests are no secret: whoever writes a file can make them fit."""
    written(tmp_path, ((0, 6),))
    real = checkpoint_file._write
    monkeypatch.setattr(
        checkpoint_file,
        "_write",
        lambda path, facts, layers: real(path, {**facts, **(said if path.name == head_name(6) else {})}, layers),
    )
    written(tmp_path, ((0, 6),))
    with pytest.raises(ArtifactError):
        read(tmp_path, 6)


def test_another_version_is_foreign(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "FORMAT", FileFormat("mlx-stream checkpoint", 2))
    written(tmp_path, ((0, 6),))
    monkeypatch.undo()
    with pytest.raises(ForeignFileError, match="checkpoint 2"):
        read(tmp_path, 6)
