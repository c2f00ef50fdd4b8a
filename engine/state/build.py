"""Builds rows' caches from a graph's geometry: the one place that chooses a cache kind for a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.graph import LINEAR_ATTENTION
from engine.contracts.kv_scheme import AffineKv, PlainKv, TurboKv, layer_scheme
from engine.state.block_pool import BlockPool
from engine.state.kv_cache import Conversion, KvCache
from engine.state.kv_pool import KvPool
from engine.state.paged_cache import PagedKvCache
from engine.state.plain_codec import PlainCodec
from engine.state.recurrent_cache import RecurrentCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry
    from engine.contracts.kv_scheme import LayerKv
    from engine.contracts.snapshot import LayerSnapshot


class CacheBuilder:
    """Makes the caches of each row of one graph; rows may share storage that it owns."""

    def __init__(self, geometry: GraphGeometry, composition: Composition) -> None:
        """Fix the form of each layer."""
        self._geometry = geometry
        self._composed = composition.composes_exponentials
        self._plain = PlainCodec(composed=self._composed)
        self._conversions = [
            self._conversion(layer_scheme(composition.kv, layer, sliding=bool(self._window(kind))))
            for layer, kind in enumerate(geometry.layer_types[: geometry.state_layers])
        ]
        paged = composition.paged_kv
        self._blocks = None if paged is None else BlockPool(paged.block_tokens)
        together = self._composed and composition.row_tile_tokens is None and paged is None
        self._pool = KvPool(geometry.state_layers) if together else None

    @property
    def converts(self) -> bool:
        """Whether a cache may have to change its form between steps, so that `Cache.maintain` must be called."""
        return any(self._conversions)

    def make_caches(self) -> list[Cache]:
        """Fresh caches, one for each layer that keeps a state."""
        layers = range(self._geometry.state_layers)
        pooled = [None] * len(layers) if self._pool is None else self._pool.make_caches()
        return [self._cache(layer, seat) for layer, seat in zip(layers, pooled, strict=True)]

    def restore(self, snapshots: Sequence[LayerSnapshot], tokens: int) -> list[Cache]:
        """Caches of a new row that hold the first `tokens` of `snapshots`, one for each layer.

        Raises:
            ValueError: the snapshots are not of these layers, or cannot be cut to `tokens`. Nothing is held then.
        """
        caches = self.make_caches()
        try:
            for cache, snapshot in zip(caches, snapshots, strict=True):
                cache.restore(snapshot, tokens)
        except Exception:
            for cache in caches:
                cache.close()
            raise
        return caches

    def _cache(self, layer: int, pooled: Cache | None) -> Cache:
        kind, conversion = self._geometry.layer_types[layer], self._conversions[layer]
        if kind == LINEAR_ATTENTION:
            return RecurrentCache()
        if conversion is None and not self._window(kind):
            if self._blocks is not None:
                return PagedKvCache(self._blocks, self._plain)
            if pooled is not None:
                return pooled
        return KvCache(self._plain, window=self._window(kind), conversion=conversion)

    def _conversion(self, scheme: LayerKv) -> Conversion | None:
        match scheme:
            case PlainKv():
                return None
            case AffineKv():
                from engine.state.affine_codec import AffineCodec  # most models' states stay as they are

                affine = AffineCodec(bits=scheme.bits, group_size=scheme.group_size, composed=self._composed)
                return Conversion(affine, scheme.start)
            case TurboKv():
                from engine.state.turbo_codec import TurboCodec  # as above

                turbo = TurboCodec(key_bits=scheme.key_bits, value_bits=scheme.value_bits, composed=self._composed)
                return Conversion(turbo, scheme.start)

    def _window(self, kind: str) -> int:
        return self._geometry.sliding_window if kind == "sliding_attention" else 0
