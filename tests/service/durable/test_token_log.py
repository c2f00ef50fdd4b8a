"""A generation's log: what is read again is what was told, and what is told again is not logged twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contracts.errors import CheckpointDamagedError, GenerationAborted, ResumePointGoneError
from engine.contracts.events import TokensGenerated
from engine.contracts.results import AbortReason, FinishReason, GeneratedToken
from service.durable import token_log
from service.durable.header import LogHeader
from service.durable.log_file import LogFile, RecordKind
from service.durable.marks import Position
from service.durable.token_log import FILE_NAME, TokenLog, open_log, was_begun_at
from tests.service.durable.logs import GENERATION_ID, ended, header, ids, said, started


@pytest.fixture
def log(tmp_path: Path) -> TokenLog:
    log = TokenLog(header())
    log.create_file(tmp_path)
    log.begin_attempt()
    log.start(started())
    return log


def test_a_header_comes_back_as_it_was() -> None:
    assert LogHeader.decode(header().encode()) == header()


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b"null", b'{"identity": {}}', header().encode()[:-9]])
def test_something_else_is_no_header(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|delimiter|Expecting|Unterminated"):
        LogHeader.decode(payload)


def test_everything_comes_back_from_the_file(log: TokenLog, tmp_path: Path) -> None:
    log.add(said(0, "He", "l"))
    log.mark(1, Position(0, 0))
    log.mark(2, Position(2, 3))
    log.add(said(2, "lo"))
    log.end(ended())
    log.close_file()
    again = open_log(tmp_path, GENERATION_ID)
    assert (again.header, again.tokens, again.ending) == (log.header, log.tokens, log.ending)
    assert again.text_between(0, again.characters) == "Hello"
    assert again.started == started()
    assert again.position_after(2) == (2, 3)
    assert again.has_come_to_its_end


def test_text_is_read_from_any_place(log: TokenLog) -> None:
    for place, text in enumerate(["ab", "", "c", "def"]):
        log.add(said(place, text))
    whole = "abcdef"
    for begin in range(7):
        for end in range(7):
            assert log.text_between(begin, end) == whole[begin:end]


def test_an_end_that_is_not_its_own_is_not_kept(log: TokenLog, tmp_path: Path) -> None:
    log.end(ended(FinishReason.CANCELLED, error=GenerationAborted(AbortReason.REQUESTED)))
    assert log.ending is not None
    assert not log.has_come_to_its_end
    log.close_file()
    assert open_log(tmp_path, GENERATION_ID).ending is None


def test_what_is_told_again_is_skipped_wherever_it_is_cut(log: TokenLog, tmp_path: Path) -> None:
    whole = ["ab", "c", "de"]
    for cut in range(4):
        log.add(said(0, *whole[:2]))
        log.begin_attempt()
        log.add(said(0, *whole[:cut]))
        log.add(said(cut, *whole[cut:]))
        log.close_file()
        again = open_log(tmp_path, GENERATION_ID)
        assert ids(again) == [100, 101, 102]
        assert again.text_between(0, again.characters) == "abcde"
        again.close_file()
        log = TokenLog(header())
        log.create_file(tmp_path)


def test_text_that_came_late_is_not_lost_with_its_tokens_known(log: TokenLog, tmp_path: Path) -> None:
    log.add(TokensGenerated(said(0, "ab", "c").tokens, "a"))
    log.close_file()
    again = open_log(tmp_path, GENERATION_ID)
    again.begin_attempt()
    again.add(said(0, "ab", "c"))
    assert again.text_between(0, again.characters) == "abc"
    assert ids(again) == [100, 101]


def test_another_story_is_damage(log: TokenLog, tmp_path: Path) -> None:
    log.add(said(0, "ab", "c"))
    log.begin_attempt()
    with pytest.raises(CheckpointDamagedError):
        log.add(TokensGenerated(said(0, "ab").tokens, "xb"))
    log.begin_attempt()
    with pytest.raises(CheckpointDamagedError):
        log.add(TokensGenerated((GeneratedToken(7, 0),), "ab"))


def test_a_point_that_was_never_sent_is_told_from_one_that_was_lost(log: TokenLog, tmp_path: Path) -> None:
    log.mark(1, Position(0, 0))
    with pytest.raises(ResumePointGoneError, match="numbered up to 1, not 2"):
        log.position_after(2)
    log.close_file()
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ResumePointGoneError, match="has lost what came after message 0"):
        open_log(tmp_path, GENERATION_ID).position_after(1)


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda content: content[:-1], ResumePointGoneError),
        (lambda content: content[:-20] + bytes(4096), ResumePointGoneError),
        (flipped, CheckpointDamagedError),
    ],
)
def test_numbers_that_a_log_has_lost_never_come_to_mean_something_else(
    log: TokenLog, tmp_path: Path, harm: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    for number in range(1, 4):
        log.add(said(number - 1, "a"))
        log.mark(number, Position(number, number))
    log.close_file()
    file = tmp_path / FILE_NAME
    file.write_bytes(harm(file.read_bytes()))
    for _ in range(3):  # in this life and in all that follow
        again = open_log(tmp_path, GENERATION_ID)
        again.mark(3, Position(1, 1))
        assert again.position_after(2) == (2, 2)
        with pytest.raises(error):
            again.position_after(3)
        again.close_file()


def test_a_whole_log_may_have_lost_its_end_with_the_power_of_its_machine(
    log: TokenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.mark(1, Position(0, 0))
    log.close_file()
    monkeypatch.setattr(token_log, "running_machine", lambda: b"started again")
    again = open_log(tmp_path, GENERATION_ID)
    again.mark(2, Position(0, 0))
    assert again.position_after(1) == (0, 0)
    with pytest.raises(ResumePointGoneError):
        again.position_after(2)


def harmed(content: bytes, harm: str, place: int) -> bytes:
    match harm:
        case "cut":
            return content[:place]
        case "flipped":
            return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        case "zeroed":
            return content[:place] + bytes(min(7, len(content) - place)) + content[place + 7 :]
        case _:
            return content[:place] + content[place + 1 :]


@pytest.mark.parametrize("harm", ["cut", "flipped", "zeroed", "a byte lost"])
def test_whatever_byte_is_harmed_a_log_tells_a_true_beginning_or_that_it_is_damaged(
    log: TokenLog, tmp_path: Path, harm: str
) -> None:
    for number in range(1, 5):
        log.add(said(number - 1, "ab"))
        log.mark(number, Position(number, 2 * number))
    log.end(ended())
    log.close_file()
    file, seen = tmp_path / FILE_NAME, set()
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(harmed(whole, harm, place))
        try:
            again = open_log(tmp_path, GENERATION_ID)
        except CheckpointDamagedError:
            seen.add(-1)
            continue
        again.close_file()
        known = len(again.tokens)
        seen.add(known)
        assert again.tokens == log.tokens[:known]
        assert again.text_between(0, again.characters) == "ab" * known
        assert again.ending in (None, log.ending)
        for number in range(1, 5):
            with contextlib.suppress(CheckpointDamagedError, ResumePointGoneError):
                assert again.position_after(number) == (number, 2 * number)
                assert number <= known
    assert seen == {-1, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", list(RecordKind))
@pytest.mark.parametrize("payload", [b"", b"\xff", b"{}", bytes(16)])
def test_a_sound_record_that_holds_nonsense_is_damage_or_nothing(
    tmp_path: Path, kind: RecordKind, payload: bytes
) -> None:
    """No writer of ours makes one; whatever it is, opening the log must end in one of two ways."""
    file = LogFile(tmp_path / FILE_NAME)
    file.append(RecordKind.HEADER, header().encode())
    file.append(kind, payload)
    file.close()
    try:
        log = open_log(tmp_path, GENERATION_ID)
    except CheckpointDamagedError:
        return
    assert log.tokens == []
    log.close_file()


@pytest.mark.parametrize("harm", ["absent", "empty", "zeroed", "another generation's", "header cut", "text"])
def test_a_log_that_does_not_say_what_was_asked_is_damage_by_name(log: TokenLog, tmp_path: Path, harm: str) -> None:
    log.close_file()
    file = tmp_path / FILE_NAME
    whole = file.read_bytes()
    if harm == "absent":
        file.unlink()
    elif harm == "another generation's":
        other = TokenLog(header("f" * 32))
        other.create_file(tmp_path)
        other.close_file()
    else:
        damaged = {"empty": b"", "zeroed": bytes(len(whole)), "header cut": whole[:90], "text": b"a\n" * 80}
        file.write_bytes(damaged[harm])
    with pytest.raises(CheckpointDamagedError, match=r"tokens\.log"):
        open_log(tmp_path, GENERATION_ID)
    assert was_begun_at(tmp_path) == (harm not in ("absent", "empty"))
