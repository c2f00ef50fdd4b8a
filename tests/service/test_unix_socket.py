"""Unix-domain sockets: who may connect, what may stand at the path, and what is left at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstream import AsyncClient
from service.address import AddressError, BindError
from service.listening import parse_listen
from service.unix_socket import MAX_PATH_BYTES, UnixAddress
from tests.service.fake_engine import FakeEngine
from tests.service.harness import read_all, serve, text_request


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        yield


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
async def test_a_socket_serves_with_the_permissions_that_were_asked_for_and_is_gone_at_the_end(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "s.sock"
    before = os.umask(0o022)
    os.umask(before)
    async with serve(FakeEngine(), at=UnixAddress(path=path, mode=mode)) as running:
        assert mode_of(path) == mode
        _, error = await read_all(running.generation.Generate(text_request()))
        assert error is None
        async with AsyncClient(f"unix:{path}") as client:
            assert (await client.generate("hi")).text == "Hello!"
    assert not path.exists()
    assert os.umask(before) == before


async def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with listening(path):
        pass
    assert path.exists()
    async with serve(FakeEngine(), at=UnixAddress(path=path)) as running:
        assert (await read_all(running.generation.Generate(text_request())))[1] is None


async def test_a_socket_that_another_server_listens_on_is_left_alone(tmp_path: Path) -> None:
    address = UnixAddress(path=tmp_path / "s.sock")
    async with serve(FakeEngine(), at=address) as running:
        with pytest.raises(BindError, match="another server listens there"):
            address.require_bindable()
        assert (await read_all(running.generation.Generate(text_request())))[1] is None


@pytest.mark.parametrize("what", ["file", "folder", "link", "broken link"])
def test_whatever_else_stands_at_the_path_is_left_alone(tmp_path: Path, what: str) -> None:
    path, target = tmp_path / "s.sock", tmp_path / "target"
    if what == "file":
        path.write_text("mine")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
        if what == "link":
            target.write_text("mine")
    with pytest.raises(BindError, match="something that is no socket is there"):
        UnixAddress(path=path).require_bindable()
    assert path.is_symlink() or path.exists()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="there is no such folder"):
        UnixAddress(path=tmp_path / "none" / "s.sock").require_bindable()


@pytest.mark.parametrize("text", ["unix:", "unix:a\0b", "unix:/" + "x" * MAX_PATH_BYTES])
def test_what_can_be_no_path_of_a_socket_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match=r"unix:PATH|at most \d+ bytes"):
        parse_listen(text)


@pytest.mark.parametrize("character", "%?#")
def test_a_path_that_clients_would_not_find_is_refused_by_its_character(character: str) -> None:
    with pytest.raises(AddressError, match=rf"must not hold '\{character}'"):
        parse_listen(f"unix:/run/a{character}20b")


def test_a_folder_without_room_for_another_name_is_refused() -> None:
    with pytest.raises(AddressError, match=r"folder of a socket has at most \d+ bytes, got 104"):
        parse_listen("unix:/" + "x" * 103 + "/s")


async def test_a_server_that_ends_leaves_the_socket_of_the_next_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with contextlib.AsyncExitStack() as after:
        async with serve(FakeEngine(), at=UnixAddress(path=path)):
            path.unlink()
            running = await after.enter_async_context(serve(FakeEngine(), at=UnixAddress(path=path)))
        assert path.is_socket()
        assert (await read_all(running.generation.Generate(text_request())))[1] is None
    assert not path.exists()


def test_an_address_reads_and_prints_the_same() -> None:
    address = parse_listen("unix:/run/a b.sock", unix_mode=0o660)
    assert isinstance(address, UnixAddress)
    assert (str(address), address.mode, address.is_local) == ("unix:/run/a b.sock", 0o660, True)
    assert str(parse_listen("[::1]:5")) == "[::1]:5"


async def test_nothing_listens_before_its_permissions_are_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between binding and `chmod` is no moment of open doors."""
    path, seen = tmp_path / "s.sock", []
    real = Path.chmod
    monkeypatch.setattr(Path, "chmod", lambda self, mode: (seen.append(mode_of(self)), real(self, mode))[1])
    async with serve(FakeEngine(), at=UnixAddress(path=path, mode=0o666)):
        assert seen == [0o600]
