"""The store of durable generations, tidying up: what goes by its time, by room or by accident, and what stays."""

import os
import threading
import time
from dataclasses import replace

import pytest

from engine.contracts.errors import NotFoundError, ResumePointGoneError
from engine.state import durable_disk
from engine.state.durable_disk import DurableDisk
from tests.engine.state.checkpoint_states import GENERATION, KEY, facts, layers

OTHER = "ab" * 16


@pytest.fixture
def opened(tmp_path):
    """Makes disks on one folder, whose first tidying is over, and closes them."""
    disks = []

    def open_disk(*, capacity_bytes=10**9, max_age_seconds=1000.0):
        disk = DurableDisk(tmp_path, capacity_bytes=capacity_bytes, max_age_seconds=max_age_seconds)
        disks.append(disk)
        assert disk.wait_idle(20)
        return disk

    yield open_disk
    for disk in disks:
        disk.close()


def place(tmp_path, generation_id=GENERATION, key=KEY):
    return tmp_path / "durable" / f"{generation_id}-{key}"


def logged(disk, generation_id=GENERATION, key=KEY):
    """A generation that is held and has a log, and no checkpoint."""
    folder = disk.create(generation_id, key)
    (folder.path / "tokens.log").write_bytes(bytes(1000))
    return folder


def released(disk, folder):
    folder.release()
    assert disk.wait_idle(20)
    return folder


def date(folder, seconds_ago):
    """Let everything in `folder`, and itself, have been written so long ago."""
    then = time.time() - seconds_ago
    for path in (*folder.iterdir(), folder):
        if path.name != "delivered":
            os.utime(path, (then, then))


def let_go_by(folder, seconds):
    """Let so much time have passed for what was delivered."""
    note = folder / "delivered"
    os.utime(note, (note.stat().st_mtime - seconds,) * 2)


def test_what_was_delivered_is_had_by_its_id_alone_until_its_time_is_over_and_then_is_gone(opened, tmp_path):
    disk = opened()
    folder = logged(disk)
    folder.deliver(keep_seconds=50)
    released(disk, folder)
    assert disk.find(KEY) is None
    kept = disk.open(GENERATION)
    assert kept.was_delivered
    let_go_by(folder.path, 60)
    kept.folder.deliver(keep_seconds=50)  # had again, and so the time begins anew
    released(disk, kept.folder)
    disk._sweep()
    assert place(tmp_path).exists()
    let_go_by(folder.path, 60)
    with pytest.raises(ResumePointGoneError):
        disk.open(GENERATION)
    disk._sweep()
    assert not place(tmp_path).exists()
    with pytest.raises(ResumePointGoneError):
        disk.open(GENERATION)


def test_at_its_start_a_server_removes_what_others_have_delivered_long_ago_and_nothing_else(opened, tmp_path):
    first, ids = opened(), [f"{number:032x}" for number in range(300)]
    for number, generation_id in enumerate(ids):
        folder = logged(first, generation_id)
        if number % 3:
            folder.deliver(keep_seconds=50)
        folder.release()
        if number % 3 == 1:
            let_go_by(folder.path, 60)
    assert first.wait_idle(20)
    opened()
    assert [place(tmp_path, one).exists() for one in ids] == [number % 3 != 1 for number in range(300)]


def test_a_tidying_of_many_folders_lets_others_have_their_turn_and_ends_with_the_disk(opened, monkeypatch):
    """Who lets go of a generation, so that another server can go on, does not wait for ten thousand dead ones."""
    disk, order, waiting = opened(), [], threading.Event()
    monkeypatch.setattr(durable_disk, "TIDY_SECONDS", 0.0)
    for number in range(30):
        folder = logged(disk, f"{number:032x}")
        folder.deliver(keep_seconds=-60)
        released(disk, folder)

    def note_removal(lock, **_):
        lock.unlock()
        order.append("removed")
        disk._is_closing = order.count("removed") == 20

    monkeypatch.setattr(disk._root, "remove", note_removal)
    for task in (waiting.wait, disk._sweep, lambda: order.append("other")):
        disk.submit(task)
    waiting.set()
    assert disk.wait_idle(20)
    assert order == ["removed", "other", *["removed"] * 19]


def test_what_somebody_still_reads_is_not_removed_however_long_that_takes(opened, tmp_path):
    folder = logged(opened())
    folder.deliver(keep_seconds=-60)
    opened()
    assert place(tmp_path).exists()


def test_what_was_had_again_since_the_folders_were_listed_has_its_time_anew(opened, tmp_path, monkeypatch):
    """A tidying of many folders takes a while; another server may have gone on with one of them meanwhile."""
    disk = opened()
    for generation_id, keep_seconds in ((GENERATION, -60), (OTHER, -60)):
        folder = logged(disk, generation_id)
        folder.deliver(keep_seconds=keep_seconds)
        released(disk, folder)
    listed = disk._root.found()
    let_go_by(place(tmp_path), -500)
    monkeypatch.setattr(disk._root, "found", lambda **_: listed)
    disk._sweep()
    assert place(tmp_path).exists()
    assert not place(tmp_path, OTHER).exists()
    one = next(one for one in listed if one.generation_id == GENERATION)
    monkeypatch.setattr(disk._root, "found", lambda **_: [replace(one, goes_at=None)])
    assert disk.find(KEY) is None, "its end was sent since"


def test_for_want_of_room_what_was_delivered_goes_first(opened, tmp_path):
    disk = opened()
    for generation_id, seconds_ago in ((GENERATION, 10), (OTHER, 500)):
        folder = logged(disk, generation_id)
        if generation_id == GENERATION:
            folder.deliver(keep_seconds=900)
        date(released(disk, folder).path, seconds_ago)
    disk._capacity_bytes = 1500
    disk._sweep()
    assert not place(tmp_path, GENERATION).exists()
    assert place(tmp_path, OTHER).exists()


@pytest.mark.parametrize("harm", ["the folder is gone", "a pipe", "a link", "it was let go of"])
def test_a_note_of_delivery_that_cannot_be_made_costs_room_alone(opened, tmp_path, harm):
    disk = opened()
    folder = logged(disk)
    note = folder.path / "delivered"
    (tmp_path / "elsewhere").write_text("mine")
    if harm == "the folder is gone":
        (folder.path / "tokens.log").unlink()
        folder.path.rmdir()
    elif harm == "a pipe":
        os.mkfifo(note)
    elif harm == "a link":
        note.symlink_to(tmp_path / "elsewhere")
    else:
        released(disk, folder)
    before = (tmp_path / "elsewhere").stat().st_mtime_ns
    folder.deliver(keep_seconds=5)
    assert (tmp_path / "elsewhere").stat().st_mtime_ns == before
    assert note.is_file() == (harm == "a link")


def test_a_clock_that_was_set_back_lets_the_time_of_everything_begin_anew(opened, tmp_path):
    """What was written "in the future" would stay for as long as the clock was wrong, and push newer things out."""
    disk = opened()
    for generation_id, seconds_ago in ((GENERATION, -(10.0**8)), (OTHER, -30.0)):
        date(released(disk, logged(disk, generation_id)).path, seconds_ago)
    before = place(tmp_path, OTHER).stat().st_mtime
    disk._sweep()
    for path in (place(tmp_path), place(tmp_path) / "tokens.log"):
        assert abs(path.stat().st_mtime - time.time()) < 500
    assert place(tmp_path, OTHER).stat().st_mtime == before, "another server's clock may be a little ahead"
    assert disk.open(GENERATION).facts is None


def test_a_clock_that_was_set_back_disturbs_nothing_that_runs(opened, tmp_path):
    disk = opened()
    folder = logged(disk)
    date(folder.path, -(10.0**8))
    disk._sweep()
    assert (folder.path / "tokens.log").stat().st_mtime > time.time() + 10**7


def test_a_worker_that_is_never_idle_tidies_up_all_the_same(opened, tmp_path, monkeypatch):
    disk = opened()
    date(released(disk, logged(disk, OTHER)).path, 2000)
    folder = disk.create(GENERATION, KEY)
    folder.offer(facts(6), layers(0, 6))
    assert disk.wait_idle(20)
    assert place(tmp_path, OTHER).exists()
    monkeypatch.setattr(durable_disk, "SWEEP_SECONDS", 0.0)
    folder.offer(facts(9), layers(6, 9))
    assert disk.wait_idle(20)
    assert not place(tmp_path, OTHER).exists()


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file"])
def test_what_is_no_folder_is_no_generation_and_takes_no_room(opened, tmp_path, kind):
    root, elsewhere = tmp_path / "durable", tmp_path / "elsewhere"
    root.mkdir(mode=0o700)
    elsewhere.mkdir()
    (elsewhere / "large").write_bytes(bytes(100_000))
    if kind == "file":
        place(tmp_path).write_bytes(bytes(100_000))
    else:
        place(tmp_path).symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nothing")
    disk = opened(capacity_bytes=50_000, max_age_seconds=-1000.0)
    assert disk._used_bytes == 0
    with pytest.raises(NotFoundError):
        disk.open(GENERATION)
    assert disk.find(KEY) is None
    assert (elsewhere / "large").exists()
    assert os.path.lexists(place(tmp_path))


def test_one_that_is_looked_for_is_locked_alone(opened):
    """However many have its key: whoever looks for another of them at the same moment is not told that it is held."""
    disk = opened()
    for number in range(5):
        released(disk, logged(disk, f"{number:032x}"))
    found = [disk.find(KEY).folder.generation_id for _ in range(5)]
    assert len(set(found)) == 5
    assert disk.find(KEY) is None
