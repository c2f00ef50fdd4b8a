"""Lets rows begin with the states of earlier ones, and keeps theirs: at the end of the prompt, and when they end.

Nothing is kept of a row that failed, nor under other tokens than those whose state was written. A fault in here costs
a row its head start, never its life. Runs on the engine thread. Units: tokens and bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from engine.contracts.cache import capacity_for
from engine.contracts.load import ClearReport
from engine.state.prefix_index import TOKEN_BYTES, length_of, shared_tokens, token_key
from engine.state.prefix_store import PrefixEntry, PrefixHit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.prefix import PrefixUse
    from engine.contracts.snapshot import LayerSnapshot
    from engine.execution.rows import KeptRow
    from engine.state.prefix_disk import DiskHit, PrefixDisk
    from engine.state.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

LEAST_TOKENS: Final = 16
"""Fewer tokens than this are computed sooner than they are copied."""
BOUNDARY_TOKENS: Final = 256
"""From this length on a state is worth a file, and is kept as soon as its prompt is read.

Source: reference, autoregressive §4.4."""


class PrefixKeeper:
    """Stands between the rows and the stores."""

    def __init__(
        self,
        store: PrefixStore,
        restore: Callable[[Sequence[LayerSnapshot], int], list[Cache]],
        disk: PrefixDisk | None = None,
        *,
        states_are_cut: bool = True,
    ) -> None:
        """Start with what the disk has.

        Args:
            store: what is kept in memory.
            restore: makes caches that hold the first tokens of some snapshots.
            disk: what is kept over restarts.
            states_are_cut: whether the model's states serve prompts that share only their beginning.
        """
        self._states_are_cut = states_are_cut
        self._store = store
        self._restore = restore
        self._disk = disk
        self._unconfirmed: dict[KeptRow, PrefixEntry] = {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be kept at most; 0 when nothing is kept."""
        return self._store.capacity_bytes

    @property
    def entries(self) -> int:
        """States held in memory."""
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes that they hold."""
        return self._store.nbytes

    def widen(self, more_bytes: int) -> None:
        """Let so much more be kept; a negative number takes away. What keeps nothing goes on keeping nothing."""
        if self._store.capacity_bytes:
            self._store.capacity_bytes = max(1, self._store.capacity_bytes + more_bytes)

    def clear(self, mark: str = "") -> ClearReport:
        """Forget the states whose namespace ends with `mark`, on disk too. What rows have begun with stays theirs."""
        self._unconfirmed = {row: one for row, one in self._unconfirmed.items() if not one.namespace.endswith(mark)}
        entries, freed_bytes = self._store.forget(mark)
        if self._disk is not None:
            files, file_bytes = self._disk.forget(mark)
            entries, freed_bytes = entries + files, freed_bytes + file_bytes
        return ClearReport(cleared_entries=entries, freed_bytes=freed_bytes)

    def awaits(self, row: KeptRow, use: PrefixUse | None, others: Iterable[tuple[KeptRow, PrefixUse | None]]) -> bool:
        """Whether `row` should wait for a prompt of `others`, which run: it begins alike, and is read to its end soon.

        Soon: what is left of it is at most twice what waiting saves. A burst of prompts with one beginning so reads it
        once. Each row that runs ends or has its first token, so nobody waits for ever.
        """
        if use is None:
            return False
        alike = [
            other
            for other, theirs in others
            if theirs is not None and theirs.namespace == use.namespace and _begins_alike(other, row, use)
        ]
        if not alike:
            return False
        key = token_key(row.prompt)
        shared = {other: tokens for other in alike if (tokens := self._shared_tokens(other, key, use))}
        if not shared:
            return False
        hit = self._store.find(use.namespace, key, cut_tokens=use.cut_tokens)
        kept = 0 if hit is None else hit.tokens
        return any(
            tokens - kept >= BOUNDARY_TOKENS and _boundary(other, use) - other.position <= 2 * (tokens - kept)
            for other, tokens in shared.items()
        )

    def _shared_tokens(self, other: KeptRow, key: bytes, use: PrefixUse) -> int:
        """Tokens of the prompt `key` that the state at the end of the prompt of `other` will serve; 0 if none."""
        boundary = _boundary(other, use)
        shared = shared_tokens(key[:-TOKEN_BYTES], token_key(other.prompt[:boundary]))
        return 0 if shared < use.least_tokens or (not self._states_are_cut and shared < boundary) else shared

    def begin(self, row: KeptRow, use: PrefixUse | None, room_bytes: int) -> tuple[list[Cache], int] | None:
        """Caches that hold the longest kept prefix of the prompt, and its length; None when there is none.

        What comes from the disk may stay in memory within `room_bytes`.
        """
        if use is None:
            return None
        hit: PrefixHit | None = None
        try:
            hit = self._longest(use, token_key(row.prompt), room_bytes)
            return None if hit is None else (self._restore(hit.entry.snapshots, hit.tokens), hit.tokens)
        except Exception:
            logger.exception("a kept prefix cannot be used; the prompt is read from its start")
            if hit is not None and hit.entry in self._store:
                self._store.drop(hit.entry)
            return None

    def stops(self, row: KeptRow, use: PrefixUse | None, cached_tokens: int) -> bool:
        """Whether the state of `row`, which begins with `cached_tokens`, is wanted at the end of its prompt."""
        if use is None:
            return False
        boundary = _boundary(row, use)
        return boundary >= max(use.least_tokens, LEAST_TOKENS if use.is_exact else BOUNDARY_TOKENS, cached_tokens + 1)

    def watch(self, row: KeptRow, use: PrefixUse | None) -> None:
        """Take the state of a row that has just reached the end of its prompt; called after each of its units."""
        if use is None or row.next_index or not self.stops(row, use, row.cached_tokens):
            return
        boundary = _boundary(row, use)
        if row.position == boundary:
            entry = self._taken(row, use, row.prompt[:boundary])
            if entry is not None:
                self._unconfirmed[row] = entry

    def confirm(self, row: KeptRow, room_bytes: int) -> None:
        """Keep what was taken at the end of the prompt, now that a sound token has followed."""
        entry = self._unconfirmed.pop(row, None)
        if entry is not None:
            self._put(entry, room_bytes)

    def keep(self, row: KeptRow, use: PrefixUse | None, room_bytes: int) -> None:
        """Keep the whole state of a row that ends, the tokens it has generated included.

        Of exact rows only the prompt as far as it was read in whole chunks: a cold prompt would write the generated
        tokens in other cuts.
        """
        if use is None or len(row.state_tokens) < LEAST_TOKENS or row.prompt_tokens <= use.least_tokens:
            return
        if use.is_exact and (row.next_index or row.position % use.cut_tokens):
            return
        entry = self._taken(row, use, row.state_tokens)
        if entry is not None:
            self._put(entry, room_bytes)

    def forget(self, row: KeptRow) -> None:
        """Let go of what was taken from a row that leaves."""
        self._unconfirmed.pop(row, None)

    def make_room(self, room_bytes: int) -> None:
        """Give memory back to rows: hold no more than `room_bytes`."""
        self._store.shrink(room_bytes)

    def close(self) -> None:
        """Drop everything, but for what the disk keeps."""
        if self._disk is not None:
            self._disk.close()
        self._unconfirmed.clear()
        self._store.shrink(0)

    def _longest(self, use: PrefixUse, key: bytes, room_bytes: int) -> PrefixHit | None:
        """The entry that serves most tokens, from memory unless the disk has a longer one."""
        least = max(LEAST_TOKENS, use.least_tokens)
        hit = self._store.find(use.namespace, key, cut_tokens=use.cut_tokens)
        if self._disk is not None:
            written = self._disk.find(use.namespace, key, cut_tokens=use.cut_tokens)
            if written is not None and written.tokens >= max(least, 1 + (0 if hit is None else hit.tokens)):
                hit = self._loaded(self._disk, written, use, room_bytes) or hit
        return hit if hit is not None and hit.tokens >= least else None

    def _loaded(self, disk: PrefixDisk, written: DiskHit, use: PrefixUse, room_bytes: int) -> PrefixHit | None:
        snapshots = disk.load(written.stored)
        if snapshots is None:
            return None
        key = written.stored.record.key
        entry = PrefixEntry(namespace=use.namespace, key=key, snapshots=snapshots, of_session=use.of_session)
        self._store.put(entry, room_bytes=room_bytes)
        return PrefixHit(entry, written.tokens)

    def _put(self, entry: PrefixEntry, room_bytes: int) -> None:
        """Keep `entry` in memory, and on disk if it is worth a file."""
        self._store.put(entry, room_bytes=room_bytes)
        if self._disk is None or length_of(entry.key) < BOUNDARY_TOKENS:
            return
        try:
            self._disk.offer(entry)
        except Exception:
            logger.exception("a prefix is not written to disk")

    def _taken(self, row: KeptRow, use: PrefixUse, tokens: Sequence[int]) -> PrefixEntry | None:
        """The state of `row` as an entry for `tokens`; None when nobody needs it, or it cannot be had."""
        key = token_key(tokens)
        if self._store.covers(use.namespace, key) or self._is_surely_too_large(row):
            return None
        try:
            snapshots = [cache.snapshot() for cache in row.caches]
        except Exception:
            logger.warning("the state of a row could not be kept", exc_info=True)
            return None
        entry = PrefixEntry(namespace=use.namespace, key=key, snapshots=snapshots, of_session=use.of_session)
        return entry if entry.serves(len(tokens)) else None

    def _is_surely_too_large(self, row: KeptRow) -> bool:
        reserved = sum(cache.nbytes for cache in row.caches)
        return reserved * row.position // capacity_for(row.position) > self._store.capacity_bytes


def _begins_alike(other: KeptRow, row: KeptRow, use: PrefixUse) -> bool:
    """Whether `other` still reads a prompt whose state will be kept, and that begins as that of `row` does."""
    if other.next_index or _boundary(other, use) < BOUNDARY_TOKENS:
        return False
    return row.prompt[:BOUNDARY_TOKENS] == other.prompt[:BOUNDARY_TOKENS]


def _boundary(row: KeptRow, use: PrefixUse) -> int:
    """Tokens of the prompt after which its state is kept: all but the last, or as many as a cold prompt is cut at."""
    most = row.prompt_tokens - 1
    return most - most % use.cut_tokens
