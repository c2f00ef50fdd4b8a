"""Keeps the states of finished prompts in memory, within a number of bytes. Never computes; donors never change.

What is found is shared, not lent: rows begin with it and write elsewhere, so an entry can be dropped at any time.
Belongs to the engine thread. Units: tokens and bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.snapshot import usable_tokens
from engine.state.prefix_index import TOKEN_BYTES, PrefixIndex, length_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.contracts.snapshot import LayerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixEntry:
    """The state after the tokens of `key`, one snapshot for each layer.

    Entries `of_session` outlive others, since a conversation comes back.
    """

    namespace: str
    key: bytes
    snapshots: Sequence[LayerSnapshot]
    of_session: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and the key."""
        return len(self.key) + sum(snapshot.nbytes for snapshot in self.snapshots)

    def serves(self, tokens: int) -> bool:
        """Whether a row that shares the first `tokens` can begin with all of them."""
        return usable_tokens(self.snapshots, tokens) == tokens


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """An entry, and how many of its tokens serve."""

    entry: PrefixEntry
    tokens: int


class PrefixStore:
    """Entries by namespace and tokens; those unused for longest go first."""

    def __init__(self, capacity_bytes: int) -> None:
        """Start empty. With a capacity of 0 nothing is ever kept."""
        self.capacity_bytes = capacity_bytes
        self._index = PrefixIndex[PrefixEntry]()
        self._loose: OrderedDict[PrefixEntry, None] = OrderedDict()
        self._sessions: OrderedDict[PrefixEntry, None] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        """Entries held."""
        return len(self._index)

    def __contains__(self, entry: PrefixEntry) -> bool:
        """Whether `entry` itself is held."""
        return entry in self._order(entry)

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Every entry, in the order in which they would be dropped."""
        return iter((*self._loose, *self._sessions))

    @property
    def nbytes(self) -> int:
        """Bytes held; never above the capacity."""
        return self._nbytes

    def find(self, namespace: str, key: bytes, *, cut_tokens: int = 1) -> PrefixHit | None:
        """The entry that serves most of the prompt `key`, whose last token always stays to be computed.

        `cut_tokens` demands that the tokens used are a multiple of it.
        """
        found = self._index.longest(
            namespace,
            key[:-TOKEN_BYTES],
            lambda entry, shared: usable_tokens(entry.snapshots, shared - shared % cut_tokens),
        )
        if found is None:
            return None
        self._touch(found[0])
        return PrefixHit(*found)

    def covers(self, namespace: str, key: bytes) -> bool:
        """Whether an entry serves all of `key` already; it then counts as used."""
        tokens = length_of(key)
        for entry in self._index.descendants(namespace, key):
            if entry.serves(tokens):
                self._touch(entry)
                return True
        return False

    def put(self, entry: PrefixEntry, *, room_bytes: int | None = None) -> bool:
        """Keep `entry` in place of one with the same tokens and of shorter ones whose work it does.

        Args:
            entry: what to keep.
            room_bytes: how much the store may hold now, when that is less than its capacity.

        Returns:
            Whether it was kept; one that is larger than the room is not.
        """
        room = self.capacity_bytes if room_bytes is None else min(self.capacity_bytes, room_bytes)
        if not entry.key or entry.nbytes > room:
            return False
        same = self._index.get(entry.namespace, entry.key)
        replaced = [] if same is None else [same]
        replaced += [
            one for one in self._index.ancestors(entry.namespace, entry.key) if entry.serves(length_of(one.key))
        ]
        for one in replaced:
            self.drop(one)
        self.shrink(room - entry.nbytes)
        self._index.put(entry.namespace, entry.key, entry)
        self._order(entry)[entry] = None
        self._nbytes += entry.nbytes
        return True

    def shrink(self, room_bytes: int) -> None:
        """Drop entries until no more than `room_bytes` are held."""
        while self._nbytes > max(0, room_bytes):
            self.drop(next(iter(self)))

    def forget(self, mark: str) -> tuple[int, int]:
        """Drop the entries whose namespace ends with `mark` ("" for all); returns how many, and their bytes."""
        found = [entry for entry in self if entry.namespace.endswith(mark)]
        for entry in found:
            self.drop(entry)
        return len(found), sum(entry.nbytes for entry in found)

    def drop(self, entry: PrefixEntry) -> None:
        """Forget one entry that is held."""
        self._index.remove(entry.namespace, entry.key)
        del self._order(entry)[entry]
        self._nbytes -= entry.nbytes

    def _touch(self, entry: PrefixEntry) -> None:
        self._order(entry).move_to_end(entry)

    def _order(self, entry: PrefixEntry) -> OrderedDict[PrefixEntry, None]:
        return self._sessions if entry.of_session else self._loose
