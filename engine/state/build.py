"""Builds a row's caches from a graph's geometry: the one place that chooses a cache kind for a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import UnsupportedOptionError
from engine.state.kv_cache import KvCache

if TYPE_CHECKING:
    from engine.contracts.cache import Cache
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry


def build_caches(geometry: GraphGeometry, composition: Composition) -> list[Cache]:
    """Fresh caches, one per layer.

    Raises:
        UnsupportedOptionError: the composition names a KV scheme that is not built yet.
    """
    if composition.kv.kind != "plain" or composition.paged_kv is not None:
        raise UnsupportedOptionError("composition.kv", f"KV scheme {composition.kv.kind!r} is not available")
    return [
        KvCache(
            window=geometry.sliding_window if kind == "sliding_attention" else 0,
            composed=composition.composes_exponentials,
        )
        for kind in geometry.layer_types
    ]
