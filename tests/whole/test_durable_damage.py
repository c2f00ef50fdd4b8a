"""Damage to what is kept of a generation: it goes on exactly, or says that data is lost. Never anything else."""

import contextlib
import errno
import os
import shutil
import subprocess

import pytest

from engine.state import durable_root
from mlxstream import DataLossError, NotFoundError, OutOfRangeError
from service.durable import log_file
from tests.waiting import until
from tests.whole.durable_runs import asked, begun, life, ordinary, raw_stream, read

AFTER_TOKENS = 60


@pytest.fixture
async def expected(whole_folder, tmp_path):
    async with life(whole_folder, tmp_path / "apart") as (_, client):
        return await read(client.stream(**ordinary(asked("seeded"))))


@pytest.fixture
async def cut_off(whole_folder, tmp_path):
    """A generation whose server has ended, and its folder, which holds a checkpoint."""
    seen = await begun_with_checkpoint(whole_folder, tmp_path, "seeded")
    (folder,) = (path for path in (tmp_path / "durable").iterdir() if path.is_dir())
    return seen, folder


async def begun_with_checkpoint(whole_folder, state_dir, kind):
    """What a stream has brought of a generation that has a checkpoint on the disk."""

    def is_kept():
        return any(state_dir.glob("durable/*/checkpoint-*.safetensors"))

    request = asked(kind, checkpoint_every_tokens=8)
    return await begun(whole_folder, state_dir, request, AFTER_TOKENS, once=is_kept)


def truncated(content):
    for share in (0, 1, 4, 9):
        yield content[: len(content) * share // 10]
    yield content[:-1]


def flipped(content):
    for share in (0.0, 0.02, 0.2, 0.5, 0.8, 0.999):
        damaged = bytearray(content)
        damaged[int(share * len(content))] ^= 0x10
        yield bytes(damaged)


def zeroed(content):
    third = len(content) // 3
    yield bytes(len(content))
    for start in (0, third, 2 * third):
        yield content[:start] + bytes(third) + content[start + third :]


def grown(content):
    yield content + b"\0" * 512
    yield content + content


HARM = {"truncated": truncated, "flipped": flipped, "zeroed": zeroed, "grown": grown}


async def goes_on_or_tells(client, seen, expected, reasons=("CHECKPOINT_DAMAGED", "RESUME_POINT_GONE")):
    """Resume where the caller stands; returns whether it went on, which must be exactly."""
    try:
        rest = await read(client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False))
    except (DataLossError, OutOfRangeError, NotFoundError) as error:
        reason = error.reason
    else:
        assert seen.then(rest).ids == expected.ids
        assert seen.then(rest).text == expected.text
        return True
    assert reason in reasons
    return False


async def trials(whole_folder, tmp_path, cut_off, expected, cases):
    """What becomes of each case, which names a file and what is written there; all in one life of a server."""
    seen, folder = cut_off
    originals = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    outcomes = {}
    async with life(whole_folder, tmp_path, grace_seconds=0.0) as (_, client):
        for case, (name, content) in cases(originals):
            restore(folder, originals)
            (folder / name).write_bytes(content)
            outcomes[case] = await goes_on_or_tells(client, seen, expected)
            if outcomes[case]:  # it came to its end, and is removed
                await until(lambda: not folder.exists())
    return outcomes


def restore(folder, originals):
    """As it was when the server ended, whatever has become of it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.with_name(folder.name.partition("-")[0] + ".gone").unlink(missing_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path, content in originals.items():
        path.write_bytes(content)


@pytest.mark.parametrize("harm", list(HARM))
async def test_a_damaged_file_of_any_kind_is_passed_over_or_told(whole_folder, tmp_path, cut_off, expected, harm):
    def cases(originals):
        for path, content in originals.items():
            for number, damaged in enumerate(HARM[harm](content)):
                yield (path.name, number), (path.name, damaged)

    outcomes = await trials(whole_folder, tmp_path, cut_off, expected, cases)
    checkpoints = [went_on for (name, _), went_on in outcomes.items() if name.startswith("checkpoint-")]
    assert checkpoints
    assert all(checkpoints)  # the log alone is enough
    assert False in outcomes.values() or harm == "grown"


async def test_files_of_another_generation_are_not_taken_for_ones_own(whole_folder, tmp_path, cut_off, expected):
    other = await another_generation(whole_folder, tmp_path)

    def cases(originals):
        for path in originals:
            for stranger in other:
                if stranger.name.split("-")[0] == path.name.split("-")[0]:
                    yield (path.name, stranger.name), (path.name, stranger.read_bytes())

    outcomes = await trials(whole_folder, tmp_path, cut_off, expected, cases)
    assert len(outcomes) > 1
    assert outcomes == {case: case[0] != "tokens.log" for case in outcomes}


async def another_generation(whole_folder, tmp_path):
    """Files of a generation of its own, log and checkpoints."""
    await begun_with_checkpoint(whole_folder, tmp_path / "other", "penalised")
    return [path for path in (tmp_path / "other").glob("durable/*/*") if path.is_file()]


async def test_leftovers_and_strangers_in_the_folder_do_no_harm(whole_folder, tmp_path, cut_off, expected):
    seen, folder = cut_off
    for name in ("checkpoint-99999999.safetensors", "checkpoint-x.part", "x_tmp", "tokens.log.part"):
        (folder / name).write_bytes(b"")
    (folder.parent / "notes").mkdir()
    (folder.parent / ("0" * 32 + "-" + "0" * 64)).mkdir()
    (folder.parent / ("f" * 32 + "-" + "f" * 64)).symlink_to(tmp_path)
    async with life(whole_folder, tmp_path) as (_, client):
        assert await goes_on_or_tells(client, seen, expected)


async def test_a_disk_that_takes_nothing_costs_durability_alone(whole_folder, tmp_path, expected, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(durable_root, "make_private_directory", refuse)
    async with life(whole_folder, tmp_path) as (_, client):
        stream = client.stream(**asked("seeded"), durable=True)
        seen = await read(stream)
        assert not stream.started.execution.checkpoint
        assert any("durable" in reason for reason in stream.started.execution.reasons)
        await read(client.stream(**asked("greedy"), durable=True))
    assert seen.ids == expected.ids
    told = [record for record in caplog.records if record.levelname == "WARNING" and "durable" in record.getMessage()]
    assert len(told) == 1


async def test_a_disk_that_fills_up_midway_costs_no_token_now_nor_later(
    whole_folder, tmp_path, expected, monkeypatch, caplog
):
    room, real = [3000], os.write

    def limited(descriptor, data):
        written = min(len(data), room[0])
        room[0] -= written
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, bytes(data[:written]))

    monkeypatch.setattr(log_file.os, "write", limited)
    seen = await begun(whole_folder, tmp_path, asked("seeded"), AFTER_TOKENS)
    assert len([record for record in caplog.records if "tokens.log" in record.getMessage()]) == 1
    monkeypatch.undo()
    async with life(whole_folder, tmp_path) as (_, client):
        await goes_on_or_tells(client, seen, expected, ("CHECKPOINT_DAMAGED", "RESUME_POINT_GONE", "NOT_FOUND"))
        again = await read(client.stream(**asked("seeded"), durable=True))
        assert again.ids == expected.ids


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte of its own, where this machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts no small disk for us")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("room_bytes", [0, 8_192, 40_960])
async def test_a_real_disk_without_room_costs_no_token_now_nor_later(whole_folder, small_disk, expected, room_bytes):
    async with life(whole_folder, small_disk) as (_, client):
        with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - room_bytes)
        seen = await read(raw_stream(client, asked("seeded")), AFTER_TOKENS)
    assert seen.ids == expected.ids[: len(seen.ids)]
    (small_disk / "filler").unlink()
    async with life(whole_folder, small_disk) as (_, client):
        await goes_on_or_tells(client, seen, expected, ("CHECKPOINT_DAMAGED", "RESUME_POINT_GONE", "NOT_FOUND"))
        again = await read(client.stream(**asked("seeded"), durable=True))
        assert again.ids == expected.ids


async def test_the_folder_may_vanish_while_a_generation_runs(whole_folder, tmp_path, expected):
    async with life(whole_folder, tmp_path) as (_, client):
        stream = raw_stream(client, asked("seeded"))
        seen = await read(stream, 10)
        (folder,) = (path for path in (tmp_path / "durable").iterdir() if path.is_dir())
        while folder.exists():  # the disk's worker may write into it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        rest = await read(stream)
    assert seen.then(rest).ids == expected.ids
