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
from engine.ops.exponential import attention_of_powers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import TableMember


class Slab(Protocol):
    """Storage of several rows. See `engine.state.kv_pool.KvSlab`."""

    def storage(self, layer: int, like: mx.array) -> mx.array:
        """The array [tenants, 2·Hkv, capacity, D] of one layer."""

    def written(self, layer: int) -> mx.array:
        """The same for a layer that was written before."""


class SlabStep:
    """See `engine.contracts.cache.TableStep`."""

    __slots__ = ("_decoding", "_slab", "_stretches", "order")

    def __init__(self, slab: Slab, members: Sequence[TableMember]) -> None:
        """Plan a step of `members`, who have room in `slab`; their slots are places in its arrays."""
        single = sorted((member for member in members if member.length == 1), key=lambda member: member.slot)
        self._slab = slab
        self._decoding = _Decoding(single) if single else None
        self._stretches = [_Stretch(member) for member in members if member.length > 1]
        self.order = [member.start for member in single]
        for stretch in self._stretches:
            self.order += range(stretch.packed.start, stretch.packed.stop)

    def attend(
        self, queries: mx.array, joined: mx.array | None, *, layer: int, scale: float, softcap: float = 0.0
    ) -> list[Callable[[], mx.array]]:
        """Write, then attend. See `engine.contracts.cache.TableStep.attend`."""
        parts: list[_Decoding | _Stretch] = [*([self._decoding] if self._decoding else []), *self._stretches]
        storage = self._slab.written(layer) if joined is None else self._slab.storage(layer, joined)
        # All writes come before all reads: a read in between would make the next write copy the whole slab.
        if joined is not None:
            for part in parts:
                part.write(storage, joined)
        return [partial(part.attended, storage, queries, scale, softcap) for part in parts]


class _Decoding:
    """The rows with one token: their places from `first` to `last`; some between them may stand idle."""

    __slots__ = ("_first", "_held", "_kept", "_last", "_positions", "_rows", "_slots", "_visible", "_written")

    def __init__(self, members: Sequence[TableMember]) -> None:
        self._first, self._last = members[0].slot, members[-1].slot
        by_slot = {member.slot: member for member in members}
        # An idle row's place borrows the first member's query, and sees its own first key; the result is dropped.
        spanned = [by_slot.get(slot) for slot in range(self._first, self._last + 1)]
        offsets = [0 if member is None else member.offset for member in spanned]
        self._held = max(offsets) + 1
        self._rows = _selection([(member or members[0]).start for member in spanned])
        self._written = _selection([member.start for member in members])
        self._slots = mx.array([member.slot for member in members], dtype=mx.int32)
        self._positions = mx.array([member.offset for member in members], dtype=mx.int32)
        full = len(spanned) == len(members)
        self._kept = None if full else mx.array([member.slot - self._first for member in members], dtype=mx.int32)
        self._visible: mx.array | None = None
        if len(set(offsets)) > 1:
            seen = mx.arange(self._held) <= mx.array(offsets)[:, None]
            self._visible = mx.where(seen, 0.0, -mx.inf).reshape(len(offsets), 1, 1, 1, self._held)

    def write(self, storage: mx.array, joined: mx.array) -> None:
        storage[self._slots, :, self._positions] = joined[self._written, :, 0]

    def attended(self, storage: mx.array, queries: mx.array, scale: float, softcap: float) -> mx.array:
        slots = slice(self._first, self._last + 1)
        mixed = _attend(storage, queries[self._rows], slots, self._held, self._visible, scale, softcap)
        return (mixed if self._kept is None else mixed[self._kept]).flatten(1)


class _Stretch:
    """Several tokens of one row: a chunk of its prompt."""

    __slots__ = ("_held", "_slots", "_visible", "_written", "packed")

    def __init__(self, member: TableMember) -> None:
        self._held = member.offset + member.length
        self._slots = slice(member.slot, member.slot + 1)
        self._written = slice(member.offset, self._held)
        self._visible = visible_keys(member.length, self._held)
        self.packed = slice(member.start, member.start + member.length)

    def write(self, storage: mx.array, joined: mx.array) -> None:
        storage[self._slots, :, self._written] = joined[self.packed].transpose(2, 1, 0, 3)

    def attended(self, storage: mx.array, queries: mx.array, scale: float, softcap: float) -> mx.array:
        stretch = queries[self.packed].transpose(2, 1, 0, 3)
        return (
            _attend(storage, stretch, self._slots, self._held, self._visible, scale, softcap)[0]
            .swapaxes(0, 1)
            .flatten(1)
        )


def _attend(
    storage: mx.array,
    queries: mx.array,
    slots: slice,
    held: int,
    visible: mx.array | None,
    scale: float,
    softcap: float,
) -> mx.array:
    kv_heads = storage.shape[1] // 2
    keys, values = storage[slots, :kv_heads, :held], storage[slots, kv_heads:, :held]
    return attention_of_powers(queries, keys, values, scale=scale, softcap=softcap, visible=visible)


def _selection(indices: list[int]) -> slice | mx.array:
    """A slice where `indices` ascend by one, which is free; else an array to gather by."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[-1] + 1)
    return mx.array(indices, dtype=mx.int32)
