"""The disk keeps entries over restarts, within its bytes, and costs nobody anything when it cannot."""

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import mlx.core as mx
import pytest

from engine.contracts.snapshot import LayerSnapshot
from engine.state import prefix_disk
from engine.state.prefix_disk import PrefixDisk
from engine.state.prefix_folder import OWN_FOLDER
from engine.state.prefix_index import token_key
from engine.state.prefix_store import PrefixEntry

ROOM = 10**8


def entry(tokens, *, namespace="", least_tokens=0, width=64):
    keys = mx.random.normal((1, 1, len(tokens), width), key=mx.random.key(sum(tokens)))
    layer = LayerSnapshot(kind="plain", tokens=len(tokens), least_tokens=least_tokens, arrays={"keys": keys})
    return PrefixEntry(namespace=namespace, key=token_key(tokens), snapshots=[layer])


@pytest.fixture
def opened(tmp_path):
    disks = []

    def open_disk(folder=tmp_path / "kept", *, identity="here", capacity_bytes=ROOM):
        disk = PrefixDisk(folder, identity=identity, capacity_bytes=capacity_bytes)
        disks.append(disk)
        assert disk.wait_idle(60)
        return disk

    yield open_disk
    for disk in disks:
        disk.close()


def offer(disk, *entries):
    for one in entries:
        disk.offer(one)
    assert disk.wait_idle(60)


def tokens_found(disk, prompt, namespace=""):
    hit = disk.find(namespace, token_key(prompt))
    return 0 if hit is None else hit.tokens


def files(tmp_path):
    return sorted((tmp_path / "kept" / OWN_FOLDER).glob("*/*/*"))


def test_an_entry_survives_a_restart_bit_for_bit(opened):
    kept = entry(range(40))
    first = opened()
    offer(first, kept)
    first.close()
    second = opened()
    hit = second.find("", token_key((*range(30), 99)))
    assert hit.tokens == 30
    loaded = second.load(hit.stored)
    assert mx.array_equal(loaded[0].arrays["keys"], kept.snapshots[0].arrays["keys"]).item()


def test_what_waits_when_the_server_stops_is_written(opened):
    disk = opened()
    disk.offer(entry(range(40)))
    disk.close()
    assert tokens_found(opened(), range(41)) == 40


def test_other_configurations_and_namespaces_are_apart(opened, tmp_path):
    disk = opened()
    offer(disk, entry(range(40)), entry(range(50), namespace="salt"))
    assert tokens_found(disk, range(60)) == 40
    assert tokens_found(disk, range(60), "salt") == 50
    assert tokens_found(disk, range(60), "pepper") == 0
    assert len(opened(identity="other weights")) == 0
    assert len(files(tmp_path)) == 2


def test_the_folder_is_private_and_names_nothing(opened, tmp_path):
    offer(opened(), entry(range(40), namespace="secret salt"))
    (path,) = files(tmp_path)
    assert "secret" not in str(path.relative_to(tmp_path))
    for folder in (tmp_path / "kept" / OWN_FOLDER, path.parent.parent, path.parent):
        assert folder.stat().st_mode & 0o077 == 0


def test_a_longer_entry_takes_the_place_of_shorter_ones(opened, tmp_path):
    disk = opened()
    offer(disk, entry(range(20)), entry((*range(10), 77)))
    offer(disk, entry(range(30)))
    assert len(files(tmp_path)) == len(disk) == 2
    offer(disk, entry(range(25)))
    assert len(files(tmp_path)) == 2
    offer(disk, entry((*range(10), 77, 78), least_tokens=12))
    assert len(files(tmp_path)) == 3


def test_a_waiting_entry_is_replaced_by_a_longer_one(opened, tmp_path, monkeypatch):
    disk, written = opened(), []
    real, all_offered = prefix_disk.write_prefix_file, threading.Event()

    def write(path, record, layers):
        assert all_offered.wait(60)
        written.append(len(record.key) // 4)
        real(path, record, layers)

    monkeypatch.setattr(prefix_disk, "write_prefix_file", write)
    for length in (20, 30, 40, 50):
        disk.offer(entry(range(length)))
    all_offered.set()
    assert disk.wait_idle(60)
    assert written[-1] == 50
    assert len(written) <= 2


def test_the_queue_is_bounded_and_drops_the_oldest(opened, monkeypatch):
    disk = opened()
    monkeypatch.setattr(prefix_disk, "QUEUE_BYTES", 3 * entry(range(20)).nbytes)
    real, all_offered = prefix_disk.write_prefix_file, threading.Event()
    monkeypatch.setattr(prefix_disk, "write_prefix_file", lambda *given: (all_offered.wait(60), real(*given)))
    for start in range(1, 200, 20):
        disk.offer(entry(range(start, start + 20)))
    all_offered.set()
    assert disk.wait_idle(60)
    assert 3 <= len(disk) <= 4
    assert tokens_found(disk, range(181, 220)) == 20


def test_files_never_exceed_the_limit_and_the_least_used_go_first(opened, tmp_path):
    size = None
    disk = opened()
    for number in range(3):
        offer(disk, entry(range(number * 100, number * 100 + 40)))
        os.utime(files(tmp_path)[0], (1, 1)) if number == 0 else None
    size = max(path.stat().st_size for path in files(tmp_path))
    disk.close()
    smaller = opened(capacity_bytes=3 * size + 50)
    assert len(smaller) == 3
    hit = smaller.find("", token_key((*range(40), 5)))
    assert smaller.load(hit.stored) is not None
    offer(smaller, entry(range(900, 940)))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size + 50
    assert tokens_found(smaller, (*range(40), 5)) == 40
    assert tokens_found(smaller, range(900, 950)) == 40
    assert tokens_found(smaller, range(100, 150)) == 0
    smaller.close()
    assert len(opened(capacity_bytes=size + 50)) == 1


def test_other_configurations_count_and_give_way(opened, tmp_path):
    offer(opened(identity="old"), entry(range(40)))
    size = files(tmp_path)[0].stat().st_size
    offer(opened(identity="new", capacity_bytes=size + 50), entry(range(40)))
    assert len(files(tmp_path)) == 1
    assert len(opened(identity="new")) == 1


def test_an_entry_above_the_limit_is_refused(opened, tmp_path):
    disk = opened(capacity_bytes=1000)
    offer(disk, entry(range(40)))
    assert (len(disk), files(tmp_path)) == (0, [])


def test_damaged_files_are_removed_and_the_prompt_is_a_miss(opened, tmp_path, caplog):
    """Field report 75: resume trusts any file with the right name."""
    disk = opened()
    offer(disk, entry(range(40)))
    (path,) = files(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    hit = disk.find("", token_key(range(50)))
    with caplog.at_level(logging.WARNING):
        assert disk.load(hit.stored) is None
    assert len(caplog.records) == 1
    assert (len(disk), files(tmp_path)) == (0, [])
    path.write_bytes(whole[:100])
    assert (len(opened()), files(tmp_path)) == (0, [])


def test_leftovers_and_empty_files_are_no_entries(opened, tmp_path):
    """Field report 74: half-written temporary files are scanned as data."""
    offer(opened(), entry(range(40)))
    folder = files(tmp_path)[0].parent
    (folder / f"{'0' * 32}-{'1' * 16}.part").write_bytes(b"half")
    (folder / f"{'0' * 32}.safetensors").touch()
    (folder / "notes.txt").write_text("mine")
    disk = opened()
    assert len(disk) == 1
    assert {path.suffix for path in files(tmp_path)} == {".safetensors", ".txt"}


def test_foreign_files_are_left_alone(opened, tmp_path):
    offer(opened(), entry(range(40)))
    (path,) = files(tmp_path)
    mx.save_safetensors(str(path.parent / "model.safetensors"), {"w": mx.ones((2,))})
    copied = path.with_name("copy.safetensors")
    copied.write_bytes(path.read_bytes())
    assert len(opened()) == 1
    assert len(files(tmp_path)) == 3


def test_room_is_never_made_of_files_that_others_wrote(opened, tmp_path):
    """An operator's models may lie in the same folder, under any name."""
    offer(opened(), entry(range(40)))
    (path,) = files(tmp_path)
    foreign = [tmp_path / "kept" / "org" / "name" / "model.safetensors", path.with_name("model.safetensors")]
    foreign += [path.with_name(f"{'0' * 32}.safetensors"), path.with_name(f"{'0' * 32}-mine.part")]
    for one in foreign:
        one.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(one.with_suffix(".safetensors")), {"w": mx.ones((9000,))})
        one.with_suffix(".safetensors").rename(one)
        os.utime(one, (1, 1))
    offer(opened(capacity_bytes=path.stat().st_size + 50), entry(range(100, 140)))
    assert all(one.exists() for one in foreign)


def test_an_entry_that_has_changed_places_is_a_miss_and_stays(opened, tmp_path):
    """What a file says of itself is compared with what was asked for, whatever it was when the folder was read."""
    disk = opened()
    offer(disk, entry(range(40)), entry(range(100, 140)))
    one, other = files(tmp_path)
    swapped = one.with_suffix(".swapped")
    one.rename(swapped), other.rename(one), swapped.rename(other)
    for start in (0, 100):
        hit = disk.find("", token_key(range(start, start + 50)))
        assert disk.load(hit.stored) is None
    assert len(disk) == 0
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("suffix", [".safetensors", "-0123456789abcdef.part"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "nested"])
def test_one_odd_item_costs_nothing_but_itself(opened, tmp_path, caplog, kind, suffix):
    offer(opened(), entry(range(40)))
    (path,) = files(tmp_path)
    odd = path.with_name("0" * 32 + suffix)
    if kind == "nested":
        header = b'{"__metadata__": {"format": "mlx-stream prefix 1", "layers": ' + b"[" * 100_000
        odd.write_bytes(len(header).to_bytes(8, "little") + header)
    else:
        make = {"folder": os.mkdir, "pipe": os.mkfifo, "dangling link": lambda path: path.symlink_to("nowhere")}
        make[kind](odd)
    disk = opened()
    assert len(disk) == 1
    offer(disk, entry(range(100, 140)))
    assert len(disk) == 2
    assert os.path.lexists(odd) == (kind != "nested")
    assert [record.levelname for record in caplog.records] in ([], ["WARNING"])


def test_a_folder_in_which_nothing_can_be_removed_is_read_all_the_same(opened, tmp_path, caplog, monkeypatch):
    offer(opened(), entry(range(40)))
    (path,) = files(tmp_path)
    damaged = path.with_name("0" * 32 + ".safetensors")
    damaged.write_bytes(path.read_bytes()[:100])
    path.with_name(f"{'0' * 32}-{'1' * 16}.part").write_bytes(b"half")

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    assert len(opened()) == 1
    assert len(caplog.records) == 2
    assert all("cannot be removed from disk (Read-only file system)" in one.message for one in caplog.records)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_cannot_be_read_now_is_a_miss_and_can_be_read_later(opened, tmp_path, monkeypatch, code):
    disk = opened()
    offer(disk, entry(range(40)))
    hit = disk.find("", token_key(range(50)))

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("engine.state.state_file.os.open", refuse)
        assert disk.load(hit.stored) is None
    assert len(files(tmp_path)) == 1
    assert disk.load(disk.find("", token_key(range(50))).stored) is not None


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_folder_that_others_could_have_written_into_is_not_trusted(opened, tmp_path, caplog, kind):
    offer(opened(), entry(range(40)))
    ours = tmp_path / "kept" / OWN_FOLDER
    if kind == "link":
        ours.rename(tmp_path / "elsewhere")
        ours.symlink_to(tmp_path / "elsewhere")
    else:
        ours.chmod(0o777)
    disk = opened()
    offer(disk, entry(range(100, 140)))
    assert len(disk) == 0
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert kind == "link" or ours.stat().st_mode & 0o777 == 0o777


def test_a_file_that_others_could_have_written_is_not_trusted(opened, tmp_path):
    offer(opened(), entry(range(40)))
    files(tmp_path)[0].chmod(0o666)
    assert len(opened()) == 0
    assert len(files(tmp_path)) == 1


def test_the_operators_own_folder_keeps_its_mode(opened, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o1777)
    offer(opened(), entry(range(40)))
    assert len(files(tmp_path)) == 1
    assert (tmp_path / "kept").stat().st_mode & 0o7777 == 0o1777


def test_a_longer_entry_takes_the_room_of_the_one_that_it_replaces(opened, tmp_path):
    disk = opened()
    offer(disk, entry(range(100, 140)), entry(range(40)))
    room = sum(path.stat().st_size for path in files(tmp_path)) + 2000
    disk.close()
    disk = opened(capacity_bytes=room)
    offer(disk, entry(range(42)))
    assert tokens_found(disk, range(50)) == 42
    assert tokens_found(disk, range(100, 150)) == 40


def test_an_entry_stays_when_its_longer_successor_cannot_be_written(opened, tmp_path, monkeypatch):
    disk = opened()
    offer(disk, entry(range(40)))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prefix_disk, "write_prefix_file", full)
    offer(disk, entry(range(60)))
    assert len(files(tmp_path)) == 1
    assert tokens_found(disk, range(70)) == 40
    assert disk.load(disk.find("", token_key(range(70))).stored) is not None


def test_files_that_vanish_under_the_index_are_a_miss(opened, tmp_path):
    """Field report 74: files vanish under the index."""
    disk = opened()
    offer(disk, entry(range(40)))
    hit = disk.find("", token_key(range(50)))
    for path in files(tmp_path):
        path.unlink()
    assert disk.load(hit.stored) is None
    assert tokens_found(disk, range(50)) == 0


def test_a_folder_removed_while_running_is_made_again(opened, tmp_path):
    disk = opened()
    offer(disk, entry(range(40)))
    for path in files(tmp_path):
        path.unlink()
        path.parent.rmdir()
    offer(disk, entry(range(100, 140)))
    assert tokens_found(disk, range(100, 150)) == 40


@pytest.mark.parametrize("kind", ["a file in its place", "full"])
def test_a_folder_that_cannot_be_written_costs_one_line(opened, tmp_path, caplog, monkeypatch, kind):
    """Field report 74: a full disk."""
    if kind == "full":
        real = os.fsync

        def full(handle):
            real(handle)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("engine.state.state_file.os.fsync", full)
    else:
        (tmp_path / "kept").write_text("not a folder")
    disk = opened()
    with caplog.at_level(logging.INFO):
        for start in (1, 101, 201):
            offer(disk, entry(range(start, start + 40)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path) not in caplog.text
    assert len(disk) == 0
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".part", ".safetensors")] == []


def test_two_servers_share_a_folder(opened, tmp_path):
    """Field report 74: two servers on one folder."""
    one, two = opened(), opened()
    offer(one, entry(range(40)))
    offer(two, entry(range(40)), entry(range(100, 140)))
    assert len(files(tmp_path)) == 2
    hit = one.find("", token_key(range(50)))
    two.load(two.find("", token_key(range(50))).stored)
    offer(two, entry(range(60)))
    assert one.load(hit.stored) is None
    assert two.load(two.find("", token_key(range(61))).stored) is not None


WRITER = """
    import sys, pathlib
    import mlx.core as mx
    from engine.state.prefix_disk import PrefixDisk
    from tests.engine.state.test_prefix_disk import entry
    disk = PrefixDisk(pathlib.Path(sys.argv[1]), identity="here", capacity_bytes=10**9)
    print("ready", flush=True)
    for start in range(1, 10**6, 300):
        disk.offer(entry(range(start, start + 200), width=2048))
        disk.wait_idle(60)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.011, 0.033, 0.07])
def test_a_kill_at_any_moment_leaves_whole_entries_alone(opened, tmp_path, seconds):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "kept")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    disk = opened()
    assert {path.suffix for path in files(tmp_path)} <= {".safetensors"}
    assert len(files(tmp_path)) == len(disk)
    for stored in list(disk._index):
        assert disk.load(stored) is not None
