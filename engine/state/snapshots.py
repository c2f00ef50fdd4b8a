"""Making snapshots of what storage holds, and cutting them again. Units: tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.snapshot import LayerSnapshot
from engine.ops.copying import true_copy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.state.codec import KvCodec


def take_snapshot(
    codec: KvCodec,
    parts: Sequence[mx.array],
    *,
    tokens: int,
    least_tokens: int = 0,
    facts: Mapping[str, int | str] | None = None,
) -> LayerSnapshot:
    """A settled copy of `parts` [1, Hkv, N, ..], which hold the newest N of `tokens` tokens.

    Raises:
        ValueError: no token is held.
    """
    refuse_empty(tokens)
    # Evaluated now: as long as a graph held the row's storage, each of its appends would copy all of it.
    copies = [true_copy(part) for part in parts]
    mx.eval(copies)
    return LayerSnapshot(
        kind=codec.kind,
        tokens=tokens,
        least_tokens=least_tokens,
        facts={**codec.facts, **(facts or {})},
        arrays=dict(zip(codec.part_names, copies, strict=True)),
    )


def refuse_empty(tokens: int) -> None:
    """Raise `ValueError` when there is nothing to take a snapshot of."""
    if not tokens:
        raise ValueError("a cache that holds no token has no snapshot")


def check_snapshot(
    snapshot: LayerSnapshot, codec: KvCodec, tokens: int, facts: Mapping[str, int | str] | None = None
) -> None:
    """Raise `ValueError` unless `snapshot` was written by `codec`, has `facts` and can be cut to `tokens`."""
    check_cut(snapshot, codec.kind, tokens)
    wanted = {**codec.facts, **(facts or {})}
    if dict(snapshot.facts) != wanted or set(snapshot.arrays) != set(codec.part_names):
        raise ValueError(f"a snapshot with {dict(snapshot.facts)} does not fill a cache with {wanted}")


def check_cut(snapshot: LayerSnapshot, kind: str, tokens: int) -> None:
    """Raise `ValueError` unless `snapshot` is of `kind` and can be cut to `tokens`."""
    if snapshot.kind != kind:
        raise ValueError(f"a snapshot of kind {snapshot.kind!r} does not fill a cache of kind {kind!r}")
    if not max(1, snapshot.least_tokens) <= tokens <= snapshot.tokens:
        raise ValueError(f"a snapshot of {snapshot.tokens} tokens cannot be cut to {tokens}")
