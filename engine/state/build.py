"""Builds rows' caches from a graph's geometry: the one place that chooses a cache kind for a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import UnsupportedOptionError
from engine.contracts.graph import LINEAR_ATTENTION
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import KvPool
from engine.state.plain_codec import PlainCodec
from engine.state.recurrent_cache import RecurrentCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry
    from engine.contracts.snapshot import LayerSnapshot


class CacheBuilder:
    """Makes the caches of each row of one graph; rows may share storage that it owns."""

    def __init__(self, geometry: GraphGeometry, composition: Composition) -> None:
        """Fix the kinds.

        Raises:
            UnsupportedOptionError: the composition names a KV scheme that is not built yet.
        """
        if composition.kv.kind != "plain" or composition.paged_kv is not None:
            raise UnsupportedOptionError("composition.kv", f"KV scheme {composition.kv.kind!r} is not available")
        self._geometry = geometry
        self._plain = PlainCodec(composed=composition.composes_exponentials)
        together = composition.composes_exponentials and composition.row_tile_tokens is None
        self._pool = KvPool(geometry.layers) if together else None

    def make_caches(self) -> list[Cache]:
        """Fresh caches, one per layer."""
        kinds = self._geometry.layer_types
        pooled = [None] * len(kinds) if self._pool is None else self._pool.make_caches()
        return [self._cache(kind, seat) for kind, seat in zip(kinds, pooled, strict=True)]

    def _cache(self, kind: str, pooled: Cache | None) -> Cache:
        if kind == LINEAR_ATTENTION:
            return RecurrentCache()
        if pooled is None or self._window(kind):
            return KvCache(self._plain, window=self._window(kind))
        return pooled

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

    def _window(self, kind: str) -> int:
        return self._geometry.sliding_window if kind == "sliding_attention" else 0


def build_caches(geometry: GraphGeometry, composition: Composition) -> list[Cache]:
    """Fresh caches of a row that shares storage with nobody. Raises what `CacheBuilder` raises."""
    return CacheBuilder(geometry, composition).make_caches()
