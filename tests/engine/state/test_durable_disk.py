"""The store of durable generations: what survives a kill, what falls back, what goes, and disks that fail."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import mlx.core as mx
import pytest

from engine.contracts.errors import CheckpointDamagedError, NotFoundError, ResumePointGoneError, UnavailableError
from engine.state import durable_disk
from engine.state.checkpoint_file import head_name
from engine.state.durable_disk import DurableDisk
from tests.engine.state.checkpoint_states import GENERATION, KEY, added, facts, layers

OTHER = "ab" * 16


@pytest.fixture
def opened(tmp_path):
    """Makes disks on one folder and closes them."""
    disks = []

    def open_disk(*, folder=tmp_path, capacity_bytes=10**9, max_age_seconds=1000.0, **options):
        disk = DurableDisk(folder, capacity_bytes=capacity_bytes, max_age_seconds=max_age_seconds, **options)
        disks.append(disk)
        assert disk.wait_idle(60)
        return disk

    yield open_disk
    for disk in disks:
        disk.close()


def keep(disk, steps=((0, 6), (6, 9), (9, 12)), *, generation_id=GENERATION, key=KEY, release=True):
    """Write checkpoints of one generation."""
    folder = disk.create(generation_id, key)
    for start, tokens in steps:
        base = folder.next_base()
        assert (base.tokens, dict(base.kinds)) == (start, {0: "plain", 2: "plain"} if start else {})
        folder.offer(facts(tokens), layers(start, tokens))
        assert disk.wait_idle(60)
    if release:
        folder.release()
        assert disk.wait_idle(60)
    return folder


def place(tmp_path, generation_id=GENERATION, key=KEY):
    return tmp_path / "durable" / f"{generation_id}-{key}"


def names(tmp_path):
    return sorted(path.name for path in place(tmp_path).iterdir())


def assert_good(kept, tokens):
    assert kept.require_good() == facts(tokens)
    assert kept.state.tokens == tokens
    assert kept.state.nbytes > 0
    snapshots = kept.state.take_snapshots()
    assert kept.state.nbytes == 0
    assert mx.array_equal(snapshots[0].arrays["keys"], added(0, tokens).arrays["keys"]).item()


def test_what_was_kept_is_found_by_its_id_and_by_its_key(opened):
    disk = opened()
    keep(disk)
    kept = disk.open(GENERATION)
    assert_good(kept, 12)
    kept.folder.release()
    assert disk.wait_idle(60)
    assert_good(disk.find(KEY), 12)
    assert disk.find("00" * 32) is None


def test_the_two_newest_checkpoints_are_kept_and_nothing_else(opened, tmp_path):
    keep(opened())
    assert names(tmp_path) == [
        "checkpoint-0000000006-added.safetensors",
        "checkpoint-0000000009-added.safetensors",
        "checkpoint-0000000009.safetensors",
        "checkpoint-0000000012-added.safetensors",
        "checkpoint-0000000012.safetensors",
    ]


def test_damage_to_the_newest_falls_back_to_the_one_before_and_to_both_is_told(opened, tmp_path, caplog):
    disk = opened()
    keep(disk)
    (place(tmp_path) / head_name(12)).write_bytes(b"zero")
    kept = disk.open(GENERATION)
    assert_good(kept, 9)
    assert kept.damaged == (head_name(12),)
    assert "passed over" in caplog.text
    kept.folder.release()
    assert disk.wait_idle(60)
    shared = place(tmp_path) / "checkpoint-0000000006-added.safetensors"
    shared.write_bytes(shared.read_bytes()[:-1])
    kept = disk.open(GENERATION)
    assert (kept.facts, kept.state, len(kept.damaged)) == (None, None, 2)
    with pytest.raises(CheckpointDamagedError, match=head_name(12)):
        kept.require_good()


def test_what_goes_on_after_damage_adds_to_what_is_whole_and_leaves_no_ruins(opened, tmp_path):
    disk = opened()
    keep(disk)
    (place(tmp_path) / "checkpoint-0000000012-added.safetensors").write_bytes(b"")
    kept = disk.open(GENERATION)
    assert kept.folder.next_base().tokens == 9
    kept.folder.offer(facts(13), layers(9, 13))
    assert disk.wait_idle(60)
    kept.folder.release()
    assert disk.wait_idle(60)
    assert_good(disk.open(GENERATION), 13)
    assert [name for name in names(tmp_path) if "12" in name] == []


def test_a_folder_without_a_checkpoint_is_one_without_a_state(opened):
    disk = opened()
    keep(disk, steps=())
    kept = disk.open(GENERATION)
    assert (kept.facts, kept.state, kept.damaged) == (None, None, ())


def test_who_runs_a_generation_has_it_alone(opened):
    """Two servers on one folder share it safely: whoever holds a generation is not disturbed."""
    first, second = opened(), opened()
    held = keep(first, release=False)
    for disk in (first, second):
        with pytest.raises(UnavailableError, match="elsewhere"):
            disk.open(GENERATION)
        assert disk.find(KEY) is None
    second._sweep(10**12)
    assert held.path.exists(), "not even for want of room"
    held.release()
    assert first.wait_idle(60)
    assert_good(second.find(KEY), 12)


def test_one_with_a_checkpoint_is_found_before_one_without(opened, tmp_path):
    disk = opened()
    keep(disk)
    age(place(tmp_path), 10)
    keep(disk, steps=(), generation_id=OTHER)
    kept = disk.find(KEY)
    assert kept.folder.generation_id == GENERATION
    assert disk.wait_idle(60)
    assert disk.find(KEY).folder.generation_id == OTHER


@pytest.mark.parametrize("name", ["", "..", "../..", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "/", "*"])
def test_an_id_that_is_none_is_not_looked_for(opened, name):
    with pytest.raises(NotFoundError):
        opened().open(name)


def age(folder, seconds):
    """Let everything in `folder`, and itself, have been written so long ago."""
    then = time.time() - seconds
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_what_is_too_old_is_gone_and_said_to_be_for_a_while(opened, tmp_path):
    disk = opened()
    keep(disk)
    age(place(tmp_path), 1001)
    with pytest.raises(ResumePointGoneError):
        disk.open(GENERATION)
    assert disk.find(KEY) is None
    disk._sweep()
    assert not place(tmp_path).exists()
    with pytest.raises(ResumePointGoneError):
        disk.open(GENERATION)
    with pytest.raises(NotFoundError):
        disk.open(OTHER)
    age(tmp_path / "durable", 1001)
    disk._sweep()
    with pytest.raises(NotFoundError):
        disk.open(GENERATION)


def test_beyond_the_cap_the_oldest_go_and_those_that_run_stay(opened, tmp_path):
    disk = opened(capacity_bytes=30_000)
    for number in range(3):
        keep(disk, generation_id=f"{number:032x}", release=number != 1)
        age(place(tmp_path, f"{number:032x}"), 90 - number)
    size = sum(path.stat().st_size for path in place(tmp_path, f"{0:032x}").iterdir())
    disk._capacity_bytes = 2 * size + 100
    disk._sweep()
    assert [place(tmp_path, f"{number:032x}").exists() for number in range(3)] == [False, True, True]
    disk._capacity_bytes = size // 2
    disk._sweep()
    assert [place(tmp_path, f"{number:032x}").exists() for number in range(3)] == [False, True, False]


def test_a_cap_that_running_generations_fill_costs_checkpoints_and_one_line(opened, tmp_path, caplog):
    disk = opened(capacity_bytes=10)
    folder = disk.create(GENERATION, KEY)
    folder.offer(facts(6), layers(0, 6))
    assert disk.wait_idle(60)
    assert names(tmp_path) == []
    assert folder.next_base() is None, "not tried again at once"
    disk._failed_at = None
    folder.offer(facts(9), layers(0, 9))
    assert disk.wait_idle(60)
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1
    assert "take the room" in caplog.text


def test_a_removed_generation_is_gone_with_or_without_a_mark(opened, tmp_path):
    disk = opened()
    for leave_mark, error in ((False, NotFoundError), (True, ResumePointGoneError)):
        folder = keep(disk, release=False)
        folder.remove(leave_mark=leave_mark)
        folder.remove(leave_mark=leave_mark)
        assert disk.wait_idle(60)
        assert not place(tmp_path).exists()
        with pytest.raises(error):
            disk.open(GENERATION)


def test_a_removal_that_was_cut_short_leaves_nothing_to_find(opened, tmp_path, monkeypatch):
    disk = opened()
    folder = keep(disk, release=False)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        folder.remove(leave_mark=False)
        assert disk.wait_idle(60)
    assert [path.suffix for path in (tmp_path / "durable").iterdir()] == [".removed"]
    with pytest.raises(NotFoundError):
        disk.open(GENERATION)
    disk._sweep()
    assert list((tmp_path / "durable").iterdir()) == []


def test_dropped_checkpoints_leave_the_folder_and_what_others_keep_in_it(opened, tmp_path):
    disk = opened()
    folder = keep(disk, release=False)
    (folder.path / "tokens.log").write_text("kept")
    (folder.path / "checkpoint-0000000099-0123456789abcdef.part").write_text("half")
    folder.drop_checkpoints()
    assert disk.wait_idle(60)
    assert names(tmp_path) == ["tokens.log"]
    assert folder.next_base() is None
    folder.offer(facts(13), layers(0, 13))
    assert disk.wait_idle(60)
    assert names(tmp_path) == ["tokens.log"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_costs_checkpoints_and_one_line_and_later_ones_are_whole(opened, monkeypatch, caplog, code):
    """Field report 74."""
    disk = opened()
    folder = disk.create(GENERATION, KEY)
    folder.offer(facts(6), layers(0, 6))
    assert disk.wait_idle(60)
    real = os.fsync

    def failing(handle):
        real(handle)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("engine.state.state_file.os.fsync", failing)
        for _ in range(2):
            disk._failed_at = None
            assert folder.next_base().tokens == 6
            folder.offer(facts(9), layers(6, 9))
            assert disk.wait_idle(60)
            assert folder.next_base() is None
    disk._failed_at = None
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1
    assert folder.next_base().tokens == 6
    folder.offer(facts(12), layers(6, 12))
    assert disk.wait_idle(60)
    folder.release()
    assert disk.wait_idle(60)
    assert not [path for path in folder.path.iterdir() if path.suffix == ".part"]
    assert_good(disk.open(GENERATION), 12)


def test_a_folder_that_cannot_be_made_leaves_generations_undurable_with_one_line(opened, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    disk = opened(folder=tmp_path / "file")
    for _ in range(2):
        assert disk.create(GENERATION, KEY) is None
    with pytest.raises(NotFoundError):
        disk.open(GENERATION)
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_place_that_others_could_have_written_into_is_not_trusted(opened, tmp_path, caplog, kind):
    keep(opened())
    if kind == "link":
        (tmp_path / "durable").rename(tmp_path / "elsewhere")
        (tmp_path / "durable").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "durable").chmod(0o755)
    disk = opened()
    assert disk.find(KEY) is None
    assert disk.create(OTHER, KEY) is None
    with pytest.raises(UnavailableError, match="cannot be read"):
        disk.open(GENERATION)


def test_a_folder_that_goes_while_it_is_in_use_costs_one_line(opened, tmp_path, caplog):
    disk = opened()
    folder = keep(disk, release=False)
    shutil.rmtree(tmp_path / "durable")
    folder.offer(facts(15), layers(12, 15))
    assert disk.wait_idle(60)
    folder.drop_checkpoints()
    folder.remove(leave_mark=True)
    assert disk.wait_idle(60)
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1
    assert "Traceback" not in caplog.text


def test_other_peoples_files_are_never_touched(opened, tmp_path):
    root = tmp_path / "durable"
    root.mkdir(mode=0o700)
    for name in ("notes.txt", f"{GENERATION}-{KEY}x", f"{GENERATION}.gone.bak", f"x{GENERATION}-{KEY}.removed"):
        (root / name).write_text("mine")
    age(root, 10**6)
    opened()._sweep()
    assert len(list(root.iterdir())) == 4


def test_what_is_waiting_is_bounded(opened, monkeypatch):
    disk = opened()
    monkeypatch.setattr(durable_disk, "QUEUE_BYTES", 100)
    folder, other = disk.create(GENERATION, KEY), disk.create(OTHER, KEY)
    written = threading.Event()
    monkeypatch.setattr(folder, "_write", lambda *_: written.wait(60))
    folder.offer(facts(6), layers(0, 6))
    assert other.next_base() is None
    written.set()
    assert disk.wait_idle(60)
    assert other.next_base() is not None


def test_closing_writes_what_is_queued_and_lets_go(opened):
    disk = opened()
    folder = disk.create(GENERATION, KEY)
    folder.offer(facts(6), layers(0, 6))
    disk.close()
    folder.release()
    assert_good(opened().open(GENERATION), 6)


KILLED = textwrap.dedent(
    """
    import sys, mlx.core
    from pathlib import Path
    from engine.state.durable_disk import DurableDisk
    from tests.engine.state.checkpoint_states import GENERATION, KEY, facts, layers

    disk = DurableDisk(Path(sys.argv[1]), capacity_bytes=10**9, max_age_seconds=1000.0)
    folder, start = disk.create(GENERATION, KEY), 0
    for tokens in range(5, 10**6, 5):
        folder.offer(facts(tokens), layers(start, tokens))
        disk.wait_idle(60)
        start = tokens
        print(tokens, flush=True)
    """
)


def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_or_the_one_before(opened, tmp_path):
    """Field report 75: kill -9 while checkpoints are written. The lock goes with the process."""
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    for number in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / str(number))], stdout=subprocess.PIPE, env=environment
        )
        with process, contextlib.suppress(BrokenPipeError):
            for _ in range(3 + 5 * number):
                told = int(process.stdout.readline())
            time.sleep(0.003 * number)
            process.kill()
            told = max([told, *map(int, process.stdout.read().split())])
        kept = opened(folder=tmp_path / str(number)).open(GENERATION)
        assert kept.damaged == ()
        assert kept.facts.state_tokens in (told, told + 5)
        assert_good(kept, kept.facts.state_tokens)
