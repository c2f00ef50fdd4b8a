"""Keeps prefixes on disk, so that they survive a restart: one file for each, written by a worker of its own.

There is no index file. What is damaged is removed, what others wrote is left alone, and a folder that cannot be read or
written costs one line of the log. Another server may use the same folder. `offer` and `load` belong to the engine
thread. Units: tokens and bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import ArtifactError
from engine.contracts.snapshot import usable_tokens
from engine.state.disk_worker import DiskWorker
from engine.state.prefix_file import PrefixRecord, read_prefix_file, read_prefix_record, write_prefix_file
from engine.state.prefix_folder import PrefixFolder, digest
from engine.state.prefix_index import TOKEN_BYTES, PrefixIndex, length_of
from engine.state.state_arrays import to_device, to_host
from engine.state.state_file import ForeignFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engine.contracts.snapshot import LayerSnapshot
    from engine.state.prefix_store import PrefixEntry
    from engine.state.state_file import HostTensor

logger = logging.getLogger(__name__)

QUEUE_BYTES: Final = 256 * 1024**2
"""States that may wait for the worker; the oldest are dropped beyond that."""
CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for what is queued."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """An entry on disk."""

    record: PrefixRecord
    path: Path


@dataclass(frozen=True, slots=True)
class DiskHit:
    """An entry on disk, and how many of its tokens serve."""

    stored: StoredPrefix
    tokens: int


@dataclass(frozen=True, slots=True)
class _Queued:
    record: PrefixRecord
    layers: Sequence[Mapping[str, HostTensor]]
    nbytes: int


class PrefixDisk:
    """The entries of one configuration in `folder`, within a number of bytes for the whole folder."""

    def __init__(self, folder: Path, *, identity: str, capacity_bytes: int) -> None:
        """Start the worker, which first reads the headers of what is there.

        Args:
            folder: made when there is something to write; a sub-folder that nobody else can read holds everything.
            identity: whatever must be equal for a state to be of use: weights, arithmetic, layout.
            capacity_bytes: bytes of all entries, whoever wrote them; those unused for longest go first.
        """
        self._folder = PrefixFolder(folder, self._warn)
        self._identity = digest(identity.encode("utf-8"))
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._index = PrefixIndex[StoredPrefix]()
        self._queue: deque[_Queued] = deque()
        self._warned: set[str] = set()
        self._worker = DiskWorker("mlx-stream-prefixes", idle=self._scan, idle_seconds=None, failed=self._failed)

    def __len__(self) -> int:
        """Entries known."""
        with self._lock:
            return len(self._index)

    def find(self, namespace: str, key: bytes, *, cut_tokens: int = 1) -> DiskHit | None:
        """The entry that serves most of the prompt `key`; see `PrefixStore.find`. Touches no file."""
        with self._lock:
            found = self._index.longest(
                namespace,
                key[:-TOKEN_BYTES],
                lambda stored, shared: usable_tokens(stored.record.layers, shared - shared % cut_tokens),
            )
        return None if found is None else DiskHit(*found)

    def load(self, stored: StoredPrefix) -> list[LayerSnapshot] | None:
        """Read an entry, verified; None when it cannot be had. It is forgotten unless it may be read another time."""
        try:
            record, tensors = read_prefix_file(stored.path)
        except ArtifactError as error:
            logger.warning("a kept prefix is dropped: %s", error)
            self._remove(stored)
            return None
        except (FileNotFoundError, ForeignFileError):
            self._forget(stored)
            return None
        except OSError as error:
            self._warn("a kept prefix cannot be read from disk now", error)
            return None
        if record != stored.record:
            self._forget(stored)
            return None
        with suppress(OSError):
            os.utime(stored.path)
        return to_device(record.layers, tensors)

    def offer(self, entry: PrefixEntry) -> None:
        """Have `entry` written, unless one that is there or waits does its work already."""
        tokens = length_of(entry.key)
        with self._lock:
            known = [stored.record for stored in self._index.descendants(entry.namespace, entry.key)]
            known += [queued.record for queued in self._queue if _begins(queued.record, entry)]
        if entry.nbytes > self._capacity_bytes or any(record.serves(tokens) for record in known):
            return
        queued = _Queued(self._record(entry), to_host(entry.snapshots), entry.nbytes)
        with self._lock:
            self._queue = deque(one for one in self._queue if not _replaces(queued.record, one.record))
            self._queue.append(queued)
            while len(self._queue) > 1 and sum(one.nbytes for one in self._queue) > QUEUE_BYTES:
                self._queue.popleft()
        self._worker.submit(self._write_oldest)

    def forget(self, mark: str) -> tuple[int, int]:
        """Remove the entries whose namespace ends with `mark` ("" for all), written or queued.

        Returns:
            How many files went, and their bytes. One that is being written at this moment stays.
        """
        with self._lock:
            self._queue = deque(one for one in self._queue if not one.record.namespace.endswith(mark))
        found = [stored for stored in self._stored() if stored.record.namespace.endswith(mark)]
        freed_bytes = 0
        for stored in found:
            with suppress(OSError):
                freed_bytes += stored.path.stat().st_size
            self._remove(stored)
        return len(found), freed_bytes

    def wait_idle(self, seconds: float) -> bool:
        """Wait until everything is read and written; returns whether it came to that."""
        return self._worker.wait_idle(seconds)

    def close(self) -> None:
        """Let the worker finish what is queued, for a while."""
        self._worker.close(CLOSE_SECONDS)

    def _scan(self) -> None:
        if not self._folder.is_ours():
            return
        self._folder.remove_orphans()
        for path in self._folder.entries(re.compile(self._identity)):
            record = self._record_in(path)
            if record is not None and record.identity == self._identity and path == self._path(record):
                with self._lock:
                    self._index.put(record.namespace, record.key, StoredPrefix(record, path))
        self._make_room(0)

    def _record_in(self, path: Path) -> PrefixRecord | None:
        """What `path` says of itself; None when that is of no use. What is damaged is removed."""
        try:
            return read_prefix_record(path)
        except ArtifactError as error:
            if self._folder.remove(path):
                logger.warning("a kept prefix is dropped: %s", error)
        except (FileNotFoundError, ForeignFileError):
            pass
        except OSError as error:
            self._warn("a kept prefix cannot be read from disk now", error)
        except Exception:
            logger.exception("a kept prefix cannot be read")
        return None

    def _write_oldest(self) -> None:
        """Done once for each entry that was offered, though some of them may have been replaced or dropped since."""
        with self._lock:
            queued = self._queue.popleft() if self._queue else None
        if queued is not None:
            self._write(queued)

    def _write(self, queued: _Queued) -> None:
        record, path = queued.record, self._path(queued.record)
        self._folder.make_place(path)
        with self._lock:
            shorter = self._index.ancestors(record.namespace, record.key)
            superseded = [one for one in shorter if record.serves(length_of(one.record.key))]
            same = self._index.get(record.namespace, record.key)
        # What is replaced stays until its successor is there: a write may fail, or be cut off.
        going_bytes = sum(self._folder.size(one.path) for one in [*superseded, *([] if same is None else [same])])
        if not self._make_room(queued.nbytes - going_bytes):
            raise OSError(errno.EDQUOT, "files that cannot be removed take the room")
        write_prefix_file(path, record, queued.layers)
        with self._lock:
            self._index.put(record.namespace, record.key, StoredPrefix(record, path))
        for one in superseded:
            self._remove(one)
        self._make_room(0)

    def _make_room(self, needed_bytes: int) -> bool:
        """Remove the entries used least recently, whoever wrote them, until `needed_bytes` fit; returns whether."""
        uses = sorted(self._folder.uses())
        excess = sum(size_bytes for _, size_bytes, _ in uses) + needed_bytes - self._capacity_bytes
        known = {stored.path: stored for stored in self._stored()}
        for _, size_bytes, path in uses:
            if excess <= 0:
                break
            if self._folder.remove(path):
                excess -= size_bytes
                if path in known:
                    self._forget(known[path])
        return excess <= 0

    def _stored(self) -> list[StoredPrefix]:
        with self._lock:
            return list(self._index)

    def _remove(self, stored: StoredPrefix) -> None:
        self._forget(stored)
        self._folder.remove(stored.path)

    def _forget(self, stored: StoredPrefix) -> None:
        with self._lock:
            if self._index.get(stored.record.namespace, stored.record.key) is stored:
                self._index.remove(stored.record.namespace, stored.record.key)

    def _record(self, entry: PrefixEntry) -> PrefixRecord:
        layers = tuple(replace(layer, arrays={}) for layer in entry.snapshots)
        return PrefixRecord(identity=self._identity, namespace=entry.namespace, key=entry.key, layers=layers)

    def _path(self, record: PrefixRecord) -> Path:
        return self._folder.path(record.identity, record.namespace, record.key)

    def _failed(self, error: OSError) -> None:
        self._warn("prefixes are not written to disk", error)

    def _warn(self, what: str, error: OSError) -> None:
        """Tell what cannot be done, each thing once."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s (%s); generations go on", what, error.strerror or error)


def _begins(record: PrefixRecord, entry: PrefixEntry) -> bool:
    return record.namespace == entry.namespace and record.key.startswith(entry.key)


def _replaces(newer: PrefixRecord, older: PrefixRecord) -> bool:
    same_line = newer.namespace == older.namespace and newer.key.startswith(older.key)
    return same_line and newer.serves(length_of(older.key))
