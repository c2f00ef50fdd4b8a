"""Everything that one durable generation has said, in memory and in its file, and how far its caller has it.

Used on the loop alone. It is bounded by the generation itself, whose prompt and `max_tokens` fit the context. What is
handed to a caller was written to the file before, so a caller never knows of a token that the file does not.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import struct
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from engine.contracts.errors import CheckpointDamagedError, ResumePointGoneError
from mlxstream.v1 import event_pb2
from service.durable.decode import decode_finished, decode_tokens
from service.durable.header import LogHeader
from service.durable.log_file import BEGINNING, LogFile, RecordKind, read_log_file
from service.durable.machine import running_machine
from service.durable.marks import Marks, Position
from service.encode import encode_chunk, encode_finished

if TYPE_CHECKING:
    from pathlib import Path

    from engine.contracts.events import GenerationFinished, PrefillProgress, TokensGenerated
    from engine.contracts.results import GeneratedToken
    from service.durable.log_file import LogContent, Record

FILE_NAME: Final = "tokens.log"
_MARK: Final = struct.Struct("<QQ")


class _Loss(enum.IntEnum):
    """What a log has lost by the time it is written on; the numbers are part of the format."""

    NONE = 0
    CUT = 1
    DAMAGED = 2


class TokenLog:
    """The log of one generation. Readers wait on events of their own, which every change sets."""

    def __init__(self, header: LogHeader) -> None:
        """Start empty, without a file."""
        self.header = header
        self.marks = Marks()
        self.started: event_pb2.Started | None = None
        self.progress: PrefillProgress | None = None
        self.tokens: list[GeneratedToken] = []
        self.ending: GenerationFinished | None = None
        self.is_whole = True
        self._machine = b""
        self._is_damaged = False
        self.listeners: set[asyncio.Event] = set()
        self._pieces: list[str] = []
        self._piece_ends: list[int] = []
        self._file: LogFile | None = None
        self._retold_characters = 0

    @property
    def characters(self) -> int:
        """Length of the text."""
        return self._piece_ends[-1] if self._piece_ends else 0

    @property
    def has_come_to_its_end(self) -> bool:
        """Whether nothing is left to generate."""
        return self.ending is not None and self.ending.error is None

    def position_after(self, sequence: int) -> Position:
        """Where the caller stands who has had every message up to this number.

        Raises:
            CheckpointDamagedError: it is not in the log, which was damaged there.
            ResumePointGoneError: no message of that number was sent, or the log has lost its end.
        """
        position = self.marks.find(sequence)
        if position is None and self._is_damaged:
            raise CheckpointDamagedError(self.header.generation_id, FILE_NAME)
        if position is None and self.marks.are_closed:
            detail = f"its log has lost what came after message {self.marks.last}: read it from an earlier one"
            raise ResumePointGoneError(self.header.generation_id, detail)
        if position is None:
            detail = f"its messages are numbered up to {self.marks.last}, not {sequence}"
            raise ResumePointGoneError(self.header.generation_id, detail)
        return position

    def text_between(self, begin: int, end: int) -> str:
        """The text from one place to another, counted in characters."""
        if begin >= end:
            return ""
        first, last = bisect_right(self._piece_ends, begin), bisect_left(self._piece_ends, end)
        start = self._piece_ends[first] - len(self._pieces[first])
        return "".join(self._pieces[first : last + 1])[begin - start : end - start]

    def create_file(self, folder: Path) -> None:
        """Begin the file of a new generation, or one anew whose file is unusable.

        Raises:
            OSError: it cannot be made, or takes nothing.
        """
        self._file = LogFile(folder / FILE_NAME)
        self._append(RecordKind.HEADER, self.header.encode())
        self._append(RecordKind.MACHINE, _Loss.NONE.to_bytes() + running_machine())
        if not self._file.is_written:
            self.close_file()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def has_file(self) -> bool:
        """Whether it is kept on disk."""
        return self._file is not None

    def rest_file(self) -> None:
        """Take no file descriptor until there is more to write."""
        if self._file is not None:
            self._file.rest()

    def close_file(self) -> None:
        """Let go of the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def begin_attempt(self) -> None:
        """The generation is about to run (again): what it has said already will be told once more, and is skipped."""
        self.started, self.progress, self.ending = None, None, None
        self._retold_characters = 0

    def start(self, started: event_pb2.Started) -> None:
        """The row was admitted."""
        self.started = started
        self._append(RecordKind.STARTED, started.SerializeToString())
        self._tell()

    def prefilled(self, progress: PrefillProgress) -> None:
        """How far the prompt is."""
        self.progress = progress
        self._tell()

    def add(self, event: TokensGenerated) -> None:
        """Take what was generated, but for what is known.

        Raises:
            CheckpointDamagedError: what is told again is not what was told before.
        """
        known = len(self.tokens)
        tokens = tuple(token for token in event.tokens if token.index >= known)
        text = self._unknown_text(event.text)
        if any(self.tokens[one.index].token != one.token for one in event.tokens if one.index < known):
            raise CheckpointDamagedError(self.header.generation_id, FILE_NAME)
        if tokens or text:
            self._take(tokens, text)
            self._append(RecordKind.TOKENS, encode_chunk(tokens, text, with_bytes=True).SerializeToString())
            self._tell()

    def end(self, finished: GenerationFinished) -> None:
        """The generation has come to its own end, or this attempt at it has ended, which the file does not keep."""
        self.ending = finished
        if self.has_come_to_its_end:
            encoded = encode_finished(finished, None, with_cache_tokens=True)
            self._append(RecordKind.FINISHED, encoded.SerializeToString())
        self._tell()

    def mark(self, sequence: int, position: Position) -> None:
        """The message of this number, which is about to be sent, leads to `position`, unless it was sent before."""
        if sequence > self.marks.last and not self.marks.are_closed:
            self.marks.add(position)
            self._append(RecordKind.MARK, _MARK.pack(*position))

    def _unknown_text(self, text: str) -> str:
        """What of `text`, which continues what this attempt has told, goes beyond the log."""
        begins = self._retold_characters
        self._retold_characters += len(text)
        known = min(len(text), max(0, self.characters - begins))
        if self.text_between(begins, begins + known) != text[:known]:
            raise CheckpointDamagedError(self.header.generation_id, FILE_NAME)
        return text[known:]

    def _take(self, tokens: tuple[GeneratedToken, ...], text: str) -> None:
        self.tokens.extend(tokens)
        if text:
            self._piece_ends.append(self.characters + len(text))
            self._pieces.append(text)

    def _append(self, kind: RecordKind, payload: bytes) -> None:
        if self._file is not None:
            self._file.append(kind, payload)

    def _tell(self) -> None:
        for listener in self.listeners:
            listener.set()

    def replay(self, record: Record) -> None:
        """Take in one record of the file.

        Raises:
            ValueError: it cannot be one.
        """
        match record.kind:
            case RecordKind.STARTED:
                self.started = event_pb2.Started.FromString(record.payload)
            case RecordKind.TOKENS:
                chunk = event_pb2.TokenChunk.FromString(record.payload)
                self._take(decode_tokens(chunk.tokens), chunk.text)
            case RecordKind.MARK if len(record.payload) == _MARK.size:
                self.marks.add(Position(*_MARK.unpack(record.payload)))
            case RecordKind.MACHINE if record.payload:
                self._take_loss(_Loss(record.payload[0]), record.payload[1:])
            case RecordKind.FINISHED:
                self.ending = decode_finished(event_pb2.Finished.FromString(record.payload))
            case _:
                raise ValueError("a second header, or half a record")

    def continue_file(self, path: Path, content: LogContent) -> None:
        """Write on after `content`, which has been replayed, and remember if it may have lost its end.

        A whole file has, too, if the machine that has written it was started again since: nothing is synced.

        Raises:
            OSError: the file cannot be opened.
        """
        self.is_whole = content.is_whole
        self._file = LogFile(path, after=content)
        machine = running_machine()
        if not content.is_whole or machine != self._machine:
            loss = _Loss.DAMAGED if content.is_damaged else _Loss.CUT
            self._take_loss(loss, machine)
            self._append(RecordKind.MACHINE, loss.to_bytes() + machine)

    def _take_loss(self, loss: _Loss, machine: bytes) -> None:
        self._machine = machine
        self._is_damaged = self._is_damaged or loss is _Loss.DAMAGED
        if loss is not _Loss.NONE:
            self.marks.close()


def was_begun_at(folder: Path) -> bool:
    """Whether anything was ever written to the log in `folder`: a process may be killed before it is."""
    try:
        return (folder / FILE_NAME).lstat().st_size > len(BEGINNING)
    except OSError:
        return False


def open_log(folder: Path, generation_id: str) -> TokenLog:
    """Read the log that lies in `folder`, and go on writing it. Waits for the disk.

    Raises:
        CheckpointDamagedError: it is not there, or is damaged so early that nothing can be told from it.
    """
    path = folder / FILE_NAME
    try:
        content = read_log_file(path)
        first, *rest = content.records
        log = TokenLog(_header(first, generation_id))
        for record in rest:
            log.replay(record)
        log.continue_file(path, content)
    except (OSError, ValueError, DecodeError) as error:
        raise CheckpointDamagedError(generation_id, FILE_NAME) from error
    return log


def _header(record: Record, generation_id: str) -> LogHeader:
    """The header in the first record, which must be that of this generation."""
    if record.kind is not RecordKind.HEADER:
        raise ValueError("no header")
    header = LogHeader.decode(record.payload)
    if header.generation_id != generation_id:
        raise ValueError("the log of another generation")
    return header
