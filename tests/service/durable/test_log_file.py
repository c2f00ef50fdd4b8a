"""Records that are only appended: what can be read again after a kill, a full disk, and every kind of damage."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from service.durable import log_file
from service.durable.log_file import BEGINNING, LogFile, Record, RecordKind, read_log_file

RECORDS = [
    Record(RecordKind.HEADER, b'{"a": 1}'),
    Record(RecordKind.TOKENS, b"one" * 40),
    Record(RecordKind.MARK, bytes(24)),
    Record(RecordKind.TOKENS, b""),
    Record(RecordKind.FINISHED, b"end"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.log"
    write(path, RECORDS)
    return path


def write(path: Path, records: list[Record]) -> None:
    file = LogFile(path)
    for record in records:
        file.append(record.kind, record.payload)
    file.close()


def ends(path: Path) -> list[int]:
    """Where each record ends."""
    found, copy = [len(BEGINNING)], path.with_name("copy")
    for count in range(1, len(RECORDS) + 1):
        write(copy, RECORDS[:count])
        found.append(copy.stat().st_size)
    copy.unlink()
    return found


def test_records_come_back_as_they_were_appended(path: Path) -> None:
    content = read_log_file(path)
    assert list(content.records) == RECORDS
    assert content.is_whole
    assert content.good_bytes == path.stat().st_size


def test_a_file_cut_at_any_byte_holds_exactly_the_records_before_the_cut(path: Path) -> None:
    whole, limits = path.read_bytes(), ends(path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        content = read_log_file(path)
        count = sum(end <= cut for end in limits[1:])
        assert list(content.records) == RECORDS[:count]
        assert content.is_whole == (cut in limits or cut == 0)


def test_a_flipped_bit_anywhere_ends_the_file_before_its_record(path: Path) -> None:
    whole, limits = path.read_bytes(), ends(path)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        content = read_log_file(path)
        assert list(content.records) == RECORDS[: max(0, sum(end <= place for end in limits) - 1)]
        assert not content.is_whole


def test_zeroes_are_no_records(path: Path) -> None:
    whole, limits = path.read_bytes(), ends(path)
    path.write_bytes(whole[: limits[2]] + bytes(4096))
    assert list(read_log_file(path).records) == RECORDS[:2]
    path.write_bytes(bytes(len(whole)))
    assert read_log_file(path).records == ()


def test_records_in_another_order_or_of_another_file_are_no_records(path: Path) -> None:
    whole, limits = path.read_bytes(), ends(path)
    second, third = whole[limits[1] : limits[2]], whole[limits[2] : limits[3]]
    path.write_bytes(whole[: limits[1]] + third + second + whole[limits[3] :])
    assert list(read_log_file(path).records) == RECORDS[:1]
    write(path.with_name("other"), [Record(RecordKind.HEADER, b"{}"), RECORDS[1]])
    other = path.with_name("other").read_bytes()
    path.write_bytes(whole[: limits[1]] + other[-(limits[2] - limits[1]) :])
    assert list(read_log_file(path).records) == RECORDS[:1]


def test_what_follows_the_good_part_is_cut_off_and_written_anew(path: Path) -> None:
    limits = ends(path)
    path.write_bytes(path.read_bytes()[: limits[3] + 5])
    file = LogFile(path, after=read_log_file(path))
    file.append(*(RecordKind.TOKENS, b"again"))
    file.close()
    content = read_log_file(path)
    assert list(content.records) == [*RECORDS[:3], Record(RecordKind.TOKENS, b"again")]
    assert content.is_whole


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_is_told_of_once_and_what_waits_is_written_when_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    room, real = [60], os.write

    def limited(descriptor: int, data: bytes) -> int:
        written = min(len(data), room[0])
        if not written:
            raise OSError(code, os.strerror(code))
        room[0] -= written
        return real(descriptor, bytes(data[:written]))

    monkeypatch.setattr(log_file.os, "write", limited)
    file = LogFile(tmp_path / "tokens.log")
    with caplog.at_level(logging.WARNING):
        for record in RECORDS:
            file.append(record.kind, record.payload)
    assert len(caplog.records) == 1
    assert str(tmp_path) not in caplog.text
    cut = read_log_file(tmp_path / "tokens.log")
    assert list(cut.records) == RECORDS[: len(cut.records)] != RECORDS
    room[0] = 10_000
    file.append(RecordKind.MARK, b"more")
    file.close()
    assert list(read_log_file(tmp_path / "tokens.log").records) == [*RECORDS, Record(RecordKind.MARK, b"more")]


def test_a_log_that_finds_no_room_for_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LogFile(tmp_path / "tokens.log")
    file.append(RecordKind.HEADER, b"{}")
    file.append(RecordKind.TOKENS, b"early")
    monkeypatch.setattr(log_file, "MAX_UNWRITTEN_BYTES", 100)
    monkeypatch.setattr(log_file.os, "write", refuse)
    for _ in range(20):
        file.append(RecordKind.TOKENS, b"x" * 30)
    monkeypatch.undo()
    file.append(RecordKind.TOKENS, b"late")
    content = read_log_file(tmp_path / "tokens.log")
    assert list(content.records) == [Record(RecordKind.HEADER, b"{}")]
    assert not content.is_whole  # so that it shows that something is missing


def refuse(descriptor: int, data: bytes) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("harm", ["link", "folder", "pipe", "absent"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "tokens.log"
    if harm == "link":
        write(tmp_path / "real", RECORDS)
        path.symlink_to(tmp_path / "real")
    elif harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError):
        read_log_file(path)
