"""Lets rows begin with the states of earlier ones, and keeps theirs: at the end of the prompt, and when they end.

Nothing is kept of a row that failed, nor under other tokens than those whose state was written. A fault in here costs
a row its head start, never its life. Runs on the engine thread. Units: tokens and bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from engine.contracts.cache import capacity_for
from engine.state.prefix_index import token_key
from engine.state.prefix_store import PrefixEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.prefix import PrefixUse
    from engine.contracts.snapshot import LayerSnapshot
    from engine.generation.row import Row
    from engine.state.prefix_store import PrefixHit, PrefixStore

logger = logging.getLogger(__name__)

LEAST_TOKENS: Final = 16
"""Fewer tokens than this are computed sooner than they are copied."""
BOUNDARY_TOKENS: Final = 256
"""From this length on a prompt's state is kept as soon as it is written. Source: reference, autoregressive §4.4."""


class PrefixKeeper:
    """Stands between the rows and the store."""

    def __init__(self, store: PrefixStore, restore: Callable[[Sequence[LayerSnapshot], int], list[Cache]]) -> None:
        """`restore` makes caches that hold the first tokens of some snapshots."""
        self._store = store
        self._restore = restore
        self._unconfirmed: dict[Row, PrefixEntry] = {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be kept at most; 0 when nothing is kept."""
        return self._store.capacity_bytes

    def begin(self, row: Row, use: PrefixUse | None) -> tuple[list[Cache], int] | None:
        """Caches that hold the longest kept prefix of the prompt, and its length; None when there is none."""
        if use is None:
            return None
        hit = self._store.find(use.namespace, token_key(row.prompt), cut_tokens=use.cut_tokens)
        if hit is None or hit.tokens < LEAST_TOKENS:
            return None
        return self._begin_with(hit)

    def watch(self, row: Row, use: PrefixUse | None) -> None:
        """Take the state of a row that has just reached the end of its prompt; called after each of its units."""
        if use is None or row.next_index:
            return
        boundary = row.prompt_tokens - 1
        boundary -= boundary % use.cut_tokens
        least = LEAST_TOKENS if use.is_exact else BOUNDARY_TOKENS
        if row.position == boundary and boundary >= least and boundary > row.cached_tokens:
            entry = self._taken(row, use, row.prompt[:boundary])
            if entry is not None:
                self._unconfirmed[row] = entry

    def confirm(self, row: Row, room_bytes: int) -> None:
        """Keep what was taken at the end of the prompt, now that a sound token has followed."""
        entry = self._unconfirmed.pop(row, None)
        if entry is not None:
            self._store.put(entry, room_bytes=room_bytes)

    def keep(self, row: Row, use: PrefixUse | None, room_bytes: int) -> None:
        """Keep the whole state of a row that ends, the tokens it has generated included.

        Not of exact rows: a cold prompt would write the generated tokens in other cuts.
        """
        if use is None or use.is_exact or len(row.state_tokens) < LEAST_TOKENS:
            return
        entry = self._taken(row, use, row.state_tokens)
        if entry is not None:
            self._store.put(entry, room_bytes=room_bytes)

    def forget(self, row: Row) -> None:
        """Let go of what was taken from a row that leaves."""
        self._unconfirmed.pop(row, None)

    def make_room(self, room_bytes: int) -> None:
        """Give memory back to rows: hold no more than `room_bytes`."""
        self._store.shrink(room_bytes)

    def close(self) -> None:
        """Drop everything."""
        self._unconfirmed.clear()
        self._store.shrink(0)

    def _begin_with(self, hit: PrefixHit) -> tuple[list[Cache], int] | None:
        try:
            return self._restore(hit.entry.snapshots, hit.tokens), hit.tokens
        except Exception:
            logger.exception("a kept prefix of %d tokens cannot be used; the prompt is read from its start", hit.tokens)
            self._store.drop(hit.entry)
            return None

    def _taken(self, row: Row, use: PrefixUse, tokens: Sequence[int]) -> PrefixEntry | None:
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

    def _is_surely_too_large(self, row: Row) -> bool:
        reserved = sum(cache.nbytes for cache in row.caches)
        return reserved * row.position // capacity_for(row.position) > self._store.capacity_bytes
