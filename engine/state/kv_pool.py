"""Pooled KV storage: rows of similar length sit side by side in slabs, and their decode steps attend in one product.

Short rows spend more on the number of operations than on arithmetic; long rows the other way round, and they leave
the caches of the processor when they are computed together. So a slab seats four rows of up to 256 tokens, or two of
up to 512; longer rows sit alone. Nobody's keys and values move when another row joins, leaves or grows. Counts are
tokens. Source: decision 0002.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.cache import TableMember, TablePlace
from engine.state.slab_step import SlabStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache

GROWTH_TOKENS = 256
SHARED_SLAB_TOKENS = 1024
LARGEST_SHARED_CAPACITY = 512


class KvPool:
    """Seats rows in slabs; `layers` counts the layers of the graph. Belongs to the engine thread."""

    def __init__(self, layers: int) -> None:
        """Start without storage."""
        self._layers = layers
        self._slabs: list[KvSlab] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, free seats included."""
        return sum(slab.nbytes for slab in self._slabs)

    def make_caches(self) -> list[Cache]:
        """The caches of one more row, one for each layer. It takes a seat with its first tokens."""
        row = _Seat(self)
        return [PooledKvCache(row, layer) for layer in range(self._layers)]

    def seat(self, tokens: int) -> tuple[KvSlab, int]:
        """A free slot for a row of `tokens`, in a new slab if there is none."""
        capacity = -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        for slab in self._slabs:
            if slab.capacity == capacity and slab.free:
                return slab, slab.free.pop(0)
        slots = SHARED_SLAB_TOKENS // capacity if capacity <= LARGEST_SHARED_CAPACITY else 1
        slab = KvSlab(self._layers, slots=slots, capacity=capacity)
        self._slabs.append(slab)
        return slab, slab.free.pop(0)

    def leave(self, slab: KvSlab, slot: int) -> None:
        """Free a slot; the lowest free one is taken next. A slab that nobody sits in is released."""
        slab.free.append(slot)
        slab.free.sort()
        if len(slab.free) == slab.slots:
            self._slabs.remove(slab)


class KvSlab:
    """Keys and values of up to `slots` rows: for each layer one array [slots, 2·Hkv, capacity, D], keys first."""

    def __init__(self, layers: int, *, slots: int, capacity: int) -> None:
        """Storage is made by the first write, which knows its shape."""
        self.slots = slots
        self.capacity = capacity
        self.free = list(range(slots))
        self._layers: list[mx.array | None] = [None] * layers

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in self._layers if array is not None)

    def layer(self, layer: int) -> mx.array | None:
        """The storage of one layer, if it was ever written."""
        return self._layers[layer]

    def copy_slot(self, source: KvSlab, source_slot: int, slot: int) -> None:
        """Take over a row that has outgrown `source`."""
        for layer in range(len(self._layers)):
            held = source.layer(layer)
            if held is not None:
                self.storage(layer, held)[slot : slot + 1, :, : source.capacity] = held[source_slot : source_slot + 1]

    def storage(self, layer: int, like: mx.array) -> mx.array:
        """The storage of `layer`, made with the heads and the dtype of `like` [.., 2·Hkv, .., D] if there is none."""
        held = self._layers[layer]
        if held is None:
            held = mx.zeros((self.slots, like.shape[1], self.capacity, like.shape[3]), dtype=like.dtype)
            self._layers[layer] = held
        return held

    def plan(self, members: Sequence[TableMember]) -> SlabStep:
        """See `engine.contracts.cache.CacheTable.plan`."""
        return SlabStep(self, members)


class _Seat:
    """Where one row sits. Shared by its layers' caches."""

    __slots__ = ("pool", "slab", "slot")

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.slab: KvSlab | None = None
        self.slot = 0

    def with_room(self, tokens: int) -> KvSlab:
        """The slab in which the row can hold `tokens`, moving there if it must."""
        if self.slab is not None and tokens <= self.slab.capacity:
            return self.slab
        slab, slot = self.pool.seat(tokens)
        if self.slab is not None:
            slab.copy_slot(self.slab, self.slot, slot)
            self.pool.leave(self.slab, self.slot)
        self.slab, self.slot = slab, slot
        return slab

    def leave(self) -> None:
        """Give the seat back; again is harmless."""
        if self.slab is not None:
            self.pool.leave(self.slab, self.slot)
            self.slab = None


class PooledKvCache:
    """One layer of one seated row."""

    __slots__ = ("_layer", "_offset", "_seat")

    def __init__(self, seat: _Seat, layer: int) -> None:
        self._seat = seat
        self._layer = layer
        self._offset = 0

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes of this row's slot, padding included."""
        slab, held = self._seat.slab, self._held()
        return 0 if slab is None or held is None else held.nbytes // slab.slots

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float) -> mx.array:
        """A table step of this row alone. See `engine.contracts.cache.Cache.attend`."""
        length = keys.shape[2]
        place = self.place_for(length)
        step = place.table.plan([TableMember(slot=place.slot, start=0, length=length, offset=self._offset)])
        packed = [part.transpose(2, 1, 0, 3) for part in (queries, mx.concatenate([keys, values], axis=1))]
        mixed = step.attend(*packed, layer=self._layer, scale=scale)[0]
        self.advance(length)
        return mixed.reshape(length, queries.shape[1], 1, -1).transpose(2, 1, 0, 3)

    def place_for(self, tokens: int) -> TablePlace:
        """Make room for `tokens` more, and say where. Moves the row when it has outgrown its slab."""
        slab = self._seat.with_room(self._offset + tokens)
        return TablePlace(slab, self._seat.slot)

    def advance(self, tokens: int) -> None:
        """Count `tokens` that a table step appended."""
        self._offset += tokens

    def arrays(self) -> Sequence[mx.array]:
        """The slab's storage of this layer, which rows share."""
        held = self._held()
        return [] if held is None else [held]

    def is_trimmable(self) -> bool:
        """Always: positions past the offset are overwritten."""
        return True

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`."""
        self._offset -= min(tokens, self._offset)

    def close(self) -> None:
        """Give the row's seat back; the other layers of the row lose it too."""
        self._seat.leave()
        self._offset = 0

    def _held(self) -> mx.array | None:
        slab = self._seat.slab
        return None if slab is None else slab.layer(self._layer)
