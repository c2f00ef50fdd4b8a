"""One packed step of the rows in one slab: where their tokens are written, and what each may see.

Planned once and used by every layer. Rows with one token attend in one product over the places from the first to the
last of them; a row in between that takes no part is computed and dropped, which costs less than moving rows. A product
holds one matrix for each row, so that nothing is summed across rows. A row sees zeros past its own tokens, and what
the mask takes from them is exactly zero: -inf in the scores, and 0·0 in the values.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from engine.ops.attention import visible_keys
from engine.ops.exponential import grouped_scores, mixed_by_powers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import TableMember


class Slab(Protocol):
    """Storage of several rows. See `engine.state.kv_pool.KvSlab`."""

    def storage(self, layer: int, like: mx.array) -> mx.array:
        """The array [tenants, 2·Hkv, capacity, D] of one layer."""

    def written(self, layer: int) -> mx.array:
        """The same for a layer that was written before."""

    def put(self, layer: int, storage: mx.array) -> None:
        """Take `storage` in the place of the array of one layer."""


class SlabStep:
    """See `engine.contracts.cache.TableStep`."""

    __slots__ = ("_decoding", "_slab", "_stretches", "members", "order")

    def __init__(self, slab: Slab, members: Sequence[TableMember]) -> None:
        """Plan a step of `members`, who have room in `slab`; their slots are places in its arrays."""
        single = sorted((member for member in members if member.length == 1), key=lambda member: member.slot)
        self._slab = slab
        self.members = members
        self._decoding = _Decoding(single) if single else None
        self._stretches = [_Stretch(member) for member in members if member.length > 1]
        self.order = [member.start for member in single]
        for stretch in self._stretches:
            self.order += range(stretch.packed.start, stretch.packed.stop)

    def storage(self, layer: int, like: mx.array | None) -> mx.array:
        """See `engine.contracts.cache.TableStep.storage`."""
        return self._slab.written(layer) if like is None else self._slab.storage(layer, like)

    def attend(
        self, queries: mx.array, joined: mx.array | None, *, layer: int, softcap: float = 0.0
    ) -> list[Callable[[], mx.array]]:
        """Write, then attend. See `engine.contracts.cache.TableStep.attend`."""
        parts: list[_Decoding | _Stretch] = [*([self._decoding] if self._decoding else []), *self._stretches]
        storage = self.storage(layer, joined)
        if joined is not None:
            # All writes come before all reads: a read in between would make the next write copy the whole slab.
            for part in parts:
                storage = part.written(storage, joined)
            self._slab.put(layer, storage)
        return [partial(part.attended, storage, queries, softcap) for part in parts]


class _Decoding:
    """The rows with one token: their places from `first` to `last`; some between them may stand idle.

    Everything that layers share is worked out once: a decode step of short rows is mostly the price of operations.
    """

    __slots__ = ("_held", "_kept", "_members", "_places", "_rows", "_slots", "_visible", "_written")

    def __init__(self, members: Sequence[TableMember]) -> None:
        first, last = members[0].slot, members[-1].slot
        by_slot = {member.slot: member for member in members}
        # An idle row's place borrows the first member's query, and sees its own first key; the result is dropped.
        spanned = [by_slot.get(slot) for slot in range(first, last + 1)]
        offsets = [0 if member is None else member.offset for member in spanned]
        self._members = members
        self._held = max(offsets) + 1
        self._slots = slice(first, last + 1)
        self._rows = _selection([(member or members[0]).start for member in spanned])
        self._written = _selection([member.start for member in members])
        self._places: dict[tuple[int, ...], mx.array] = {}
        full = len(spanned) == len(members)
        self._kept = None if full else mx.array([member.slot - first for member in members], dtype=mx.int32)
        self._visible: mx.array | None = None
        if len(set(offsets)) > 1:
            seen = mx.arange(self._held) <= mx.array(offsets)[:, None]
            self._visible = mx.where(seen, 0.0, -mx.inf).reshape(len(offsets), 1, 1, self._held)

    def written(self, storage: mx.array, joined: mx.array) -> mx.array:
        """`storage` with the members' keys and values from `joined`."""
        _, heads, capacity, size = storage.shape
        lines = storage.reshape(-1, size)
        lines[self._lines(heads, capacity)] = joined[self._written].reshape(-1, size)
        return lines.reshape(storage.shape)

    def attended(self, storage: mx.array, queries: mx.array, softcap: float) -> mx.array:
        """[rows, H·D] of multiplied `queries` [T, H, 1, D]."""
        kv_heads, size = storage.shape[1] // 2, storage.shape[3]
        grouped = queries[self._rows].reshape(-1, kv_heads, queries.shape[1] // kv_heads, size)
        scores = grouped_scores(grouped, storage[self._slots, :kv_heads, : self._held], softcap)
        if self._visible is not None:
            scores = scores + self._visible
        mixed = mixed_by_powers(scores, storage[self._slots, kv_heads:, : self._held]).flatten(1)
        return mixed if self._kept is None else mixed[self._kept]

    def _lines(self, heads: int, capacity: int) -> mx.array:
        """Which lines of a storage with `heads` and `capacity` are written; layers of one shape share the answer."""
        known = self._places.get((heads, capacity))
        if known is None:
            places = [
                (member.slot * heads + head) * capacity + member.offset
                for member in self._members
                for head in range(heads)
            ]
            known = self._places[heads, capacity] = mx.array(places, dtype=mx.int32)
        return known


class _Stretch:
    """Several tokens of one row: a chunk of its prompt."""

    __slots__ = ("_held", "_slots", "_visible", "_written", "packed")

    def __init__(self, member: TableMember) -> None:
        self._held = member.offset + member.length
        self._slots = slice(member.slot, member.slot + 1)
        self._written = slice(member.offset, self._held)
        self._visible = visible_keys(member.length, self._held)
        self.packed = slice(member.start, member.start + member.length)

    def written(self, storage: mx.array, joined: mx.array) -> mx.array:
        """`storage` with the chunk's keys and values from `joined`."""
        storage[self._slots, :, self._written] = joined[self.packed].transpose(2, 1, 0, 3)
        return storage

    def attended(self, storage: mx.array, queries: mx.array, softcap: float) -> mx.array:
        """[length, H·D] of multiplied `queries` [T, H, 1, D]."""
        kv_heads, size = storage.shape[1] // 2, storage.shape[3]
        stretch = queries[self.packed].transpose(2, 1, 0, 3)
        _, heads, length, _ = stretch.shape
        scores = grouped_scores(
            stretch.reshape(1, kv_heads, -1, size), storage[self._slots, :kv_heads, : self._held], softcap
        )
        scores = (scores.reshape(1, kv_heads, -1, length, self._held) + self._visible).reshape(scores.shape)
        mixed = mixed_by_powers(scores, storage[self._slots, kv_heads:, : self._held])
        return mixed.reshape(heads, length, size).swapaxes(0, 1).flatten(1)


def _selection(indices: list[int]) -> slice | mx.array:
    """A slice where `indices` ascend by one, which is free; else an array to gather by."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[-1] + 1)
    return mx.array(indices, dtype=mx.int32)
