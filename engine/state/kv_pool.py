"""Pooled KV storage: rows of similar length sit side by side in slabs, and their decode steps attend in one product.

Short rows spend more on the number of operations than on arithmetic; long rows the other way round, and they leave
the caches of the processor when they are computed together. So a slab seats four rows of up to 256 tokens, or two of
up to 512; longer rows sit alone. A slab holds its tenants and no free seats: whoever comes or leaves copies the one to
three others, and in exchange the pool never holds more than its rows were predicted to need. What lies past a row's
tokens is zero, never the numbers of one who sat there before: a NaN would survive any mask. Counts are tokens.
Source: decision 0002.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import mlx.core as mx

from engine.contracts.cache import TableMember, TablePlace, capacity_for
from engine.ops.exponential import query_factor
from engine.state.plain_codec import PlainCodec
from engine.state.slab_step import SlabStep
from engine.state.snapshots import check_snapshot, refuse_empty, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.snapshot import LayerSnapshot

_PLAIN = PlainCodec()
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
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def make_caches(self) -> list[Cache]:
        """The caches of one more row, one for each layer. It takes a seat with its first tokens."""
        row = _Seat(self)
        return [PooledKvCache(row, layer) for layer in range(self._layers)]

    def seat(self, tokens: int) -> tuple[KvSlab, int]:
        """A slab in which a row of `tokens` has entered, and its slot there."""
        capacity = capacity_for(tokens)
        for slab in self._slabs:
            if slab.capacity == capacity and slab.has_room:
                return slab, slab.enter()
        seats = SHARED_SLAB_TOKENS // capacity if capacity <= LARGEST_SHARED_CAPACITY else 1
        slab = KvSlab(self._layers, seats=seats, capacity=capacity)
        self._slabs.append(slab)
        return slab, slab.enter()

    def leave(self, slab: KvSlab, slot: int) -> None:
        """Give a row's storage back, and the slab with the last of its rows."""
        slab.leave(slot)
        if slab.is_empty:
            self._slabs.remove(slab)


class KvSlab:
    """Keys and values of up to `seats` rows: for each layer one array [tenants, 2·Hkv, capacity, D], keys first.

    A slot is a tenant's name; its place on the first axis changes when another leaves, so it is looked up when a step
    is planned.
    """

    def __init__(self, layers: int, *, seats: int, capacity: int) -> None:
        """Storage is made by the first write, which knows its shape."""
        self.capacity = capacity
        self._seats = seats
        self._tenants: list[int] = []
        self._layers: list[mx.array | None] = [None] * layers

    @property
    def has_room(self) -> bool:
        """Whether one more row may enter."""
        return len(self._tenants) < self._seats

    @property
    def is_empty(self) -> bool:
        """Whether nobody sits here."""
        return not self._tenants

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(array.nbytes for array in self._layers if array is not None)

    def enter(self) -> int:
        """Add a row of zeros; returns its slot."""
        slot = min(set(range(self._seats)) - set(self._tenants))
        self._tenants.append(slot)
        for layer, held in enumerate(self._layers):
            if held is not None:
                fresh = mx.zeros((1, *held.shape[1:]), dtype=held.dtype)
                self._layers[layer] = mx.concatenate([held, fresh], axis=0)
        return slot

    def leave(self, slot: int) -> None:
        """Drop a row and its storage."""
        left = self._tenants.index(slot)
        self._tenants.pop(left)
        if self.is_empty:
            self._layers = [None] * len(self._layers)
            return
        staying = mx.array([place for place in range(len(self._tenants) + 1) if place != left], dtype=mx.int32)
        self._layers = [None if held is None else mx.take(held, staying, axis=0) for held in self._layers]
        # Copied now, so that the storage is not held until a neighbour steps, who is told of any failure then.
        with suppress(RuntimeError):
            mx.async_eval([held for held in self._layers if held is not None])  # type: ignore[no-untyped-call]

    def layer(self, layer: int) -> mx.array | None:
        """The storage of one layer, if it was ever written."""
        return self._layers[layer]

    def take_over(self, slot: int, source: KvSlab, source_slot: int) -> None:
        """Copy a row that has outgrown `source` into its new slot."""
        place, source_place = self._place(slot), source._place(source_slot)
        for layer in range(len(self._layers)):
            held = source.layer(layer)
            if held is not None:
                row = held[source_place : source_place + 1]
                self.storage(layer, held)[place : place + 1, :, : source.capacity] = row

    def clear(self, slot: int, layer: int, tokens: slice) -> None:
        """Zero positions of one row."""
        held, place = self._layers[layer], self._place(slot)
        if held is not None:
            held[place : place + 1, :, tokens] = 0

    def read(self, slot: int, layer: int, tokens: int) -> mx.array:
        """The first `tokens` of one row [1, 2·Hkv, tokens, D]; the layer must have been written.

        Raises:
            ValueError: it never was.
        """
        held, place = self._layers[layer], self._place(slot)
        if held is None:
            raise ValueError(f"layer {layer} was never written")
        return held[place : place + 1, :, :tokens]

    def fill(self, slot: int, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write the first tokens of one row: `keys` and `values` [1, Hkv, L, D], each copied once."""
        row, (_, heads, count, size) = self._place(slot), keys.shape
        held = self._storage(layer, 2 * heads, size, keys.dtype)
        held[row : row + 1, :heads, :count] = keys
        held[row : row + 1, heads:, :count] = values

    def storage(self, layer: int, like: mx.array) -> mx.array:
        """The storage of `layer`, made with the heads and the dtype of `like` [.., 2·Hkv, .., D] if there is none."""
        return self._storage(layer, like.shape[1], like.shape[3], like.dtype)

    def _storage(self, layer: int, heads: int, size: int, dtype: mx.Dtype) -> mx.array:
        held = self._layers[layer]
        if held is None:
            held = mx.zeros((len(self._tenants), heads, self.capacity, size), dtype=dtype)
            self._layers[layer] = held
        return held

    def written(self, layer: int) -> mx.array:
        """The storage of `layer`, which was written before; raises `KeyError` when it was not."""
        held = self._layers[layer]
        if held is None:
            raise KeyError(layer)
        return held

    def put(self, layer: int, storage: mx.array) -> None:
        """Hold `storage`, which was made of the array that is there, in its place."""
        self._layers[layer] = storage

    def plan(self, members: Sequence[TableMember]) -> SlabStep:
        """See `engine.contracts.cache.CacheTable.plan`."""
        return SlabStep(self, [replace(member, slot=self._place(member.slot)) for member in members])

    def _place(self, slot: int) -> int:
        return self._tenants.index(slot)


class _Seat:
    """Where one row sits. Shared by its layers' caches."""

    __slots__ = ("_place", "pool", "slab", "slot")

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.slab: KvSlab | None = None
        self.slot = 0
        self._place: TablePlace | None = None

    def place(self, tokens: int) -> TablePlace:
        """Where the row can hold `tokens`; asked by every layer of every step."""
        slab = self.with_room(tokens)
        if self._place is None or self._place.table is not slab or self._place.slot != self.slot:
            self._place = TablePlace(slab, self.slot)
        return self._place

    def with_room(self, tokens: int) -> KvSlab:
        """The slab in which the row can hold `tokens`, moving there if it must."""
        if self.slab is not None and tokens <= self.slab.capacity:
            return self.slab
        slab, slot = self.pool.seat(tokens)
        if self.slab is not None:
            slab.take_over(slot, self.slab, self.slot)
            self.pool.leave(self.slab, self.slot)
        self.slab, self.slot = slab, slot
        return slab

    def leave(self) -> None:
        """Give the storage back; again is harmless."""
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
        """Bytes of this row's share, padding included."""
        held = self._held()
        return 0 if held is None else held.nbytes // held.shape[0]

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, softcap: float = 0.0
    ) -> mx.array:
        """Append, then attend causally, in a table step of this row alone."""
        length = keys.shape[2]
        place = self.place_for(length)
        step = place.table.plan([TableMember(slot=place.slot, start=0, length=length, offset=self._offset)])
        packed = [part.transpose(2, 1, 0, 3) for part in (queries, mx.concatenate([keys, values], axis=1))]
        factor = query_factor(scale, softcap)
        mixed = step.attend(packed[0] * factor, packed[1], layer=self._layer, softcap=softcap)[0]()
        self.advance(length)
        return mixed.reshape(length, queries.shape[1], 1, -1).transpose(2, 1, 0, 3)

    def append(self, keys: mx.array, values: mx.array) -> NoReturn:
        """A seated row's tokens are written by its table's steps, so this is never called."""
        raise NotImplementedError(f"{keys.shape[2]} tokens were written past a table")

    @property
    def is_seated(self) -> bool:
        """Always: rows of one table attend together."""
        return True

    def place_for(self, tokens: int) -> TablePlace:
        """Make room for `tokens` more, and say where. Moves the row when it has outgrown its slab."""
        return self._seat.place(self._offset + tokens)

    def advance(self, tokens: int) -> None:
        """Count `tokens` that a table step appended."""
        self._offset += tokens

    def arrays(self) -> Sequence[mx.array]:
        """The slab's storage of this layer, which rows share."""
        held = self._held()
        return [] if held is None else [held]

    def maintain(self) -> None:
        """Nothing to do: pooled rows stay plain."""

    @property
    def trimmable_tokens(self) -> int:
        """All: positions past the offset are zero again."""
        return self._offset

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`."""
        end = self._offset
        self._offset -= min(tokens, end)
        if self._seat.slab is not None:
            self._seat.slab.clear(self._seat.slot, self._layer, slice(self._offset, end))

    def snapshot(self) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.snapshot`."""
        return self._taken(0)

    def added_since(self, tokens: int) -> LayerSnapshot:
        """See `engine.contracts.cache.Cache.added_since`."""
        return self._taken(tokens if tokens < self._offset else 0)

    def _taken(self, start: int) -> LayerSnapshot:
        refuse_empty(self._offset)
        joined = self._seat.with_room(self._offset).read(self._seat.slot, self._layer, self._offset)[:, :, start:]
        kv_heads = joined.shape[1] // 2
        parts = [joined[:, :kv_heads], joined[:, kv_heads:]]
        return take_snapshot(_PLAIN, parts, start=start, tokens=self._offset)

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """See `engine.contracts.cache.Cache.restore`."""
        check_snapshot(snapshot, _PLAIN, tokens)
        keys, values = (snapshot.arrays[name][:, :, :tokens] for name in _PLAIN.part_names)
        self._seat.with_room(tokens).fill(self._seat.slot, self._layer, keys, values)
        self._offset = tokens

    def close(self) -> None:
        """Give the row's storage back; the other layers of the row lose it too."""
        self._seat.leave()
        self._offset = 0

    def _held(self) -> mx.array | None:
        slab = self._seat.slab
        return None if slab is None else slab.layer(self._layer)
