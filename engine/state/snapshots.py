"""Making snapshots of what storage holds, and cutting them again. Units: tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine.contracts.snapshot import LayerSnapshot
from engine.ops.copying import true_copy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.state.codec import KvCodec

PAGED: Final = "paged"
"""The kind of snapshots whose arrays are blocks of tokens, in order."""


def take_snapshot(
    codec: KvCodec,
    parts: Sequence[mx.array],
    *,
    tokens: int,
    start: int = 0,
    least_tokens: int = 0,
    facts: Mapping[str, int | str] | None = None,
) -> LayerSnapshot:
    """A settled copy of `parts` [1, Hkv, N, ..], which hold the newest N of `tokens` tokens, from `start` on at most.

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
        start=start,
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
    if snapshot.start:
        raise ValueError(f"a piece that starts at token {snapshot.start} is no whole state")
    if not max(1, snapshot.least_tokens) <= tokens <= snapshot.tokens:
        raise ValueError(f"a snapshot of {snapshot.tokens} tokens cannot be cut to {tokens}")


def joined(pieces: Sequence[LayerSnapshot]) -> LayerSnapshot:
    """The state that `pieces` make up: a whole one, then what was added to it, in order.

    Raises:
        ValueError: they do not follow each other, or are of different kinds.
    """
    first, *others = pieces
    if not others:
        return first
    for before, piece in pairwise(pieces):
        if piece.start != before.tokens or piece.kind != first.kind:
            raise ValueError(
                f"a piece from {piece.start} of kind {piece.kind!r} does not follow one to {before.tokens}"
            )
    if first.kind == PAGED:
        return _joined_blocks(pieces)
    names = first.arrays.keys()
    if any(piece.facts != first.facts or piece.arrays.keys() != names for piece in others):
        raise ValueError(f"pieces of kind {first.kind!r} have different facts")
    # Each part holds one entry per token on its third axis; see `engine.state.codec`.
    arrays = {name: mx.concatenate([piece.arrays[name] for piece in pieces], axis=2) for name in names}
    mx.eval(arrays)
    newest = pieces[-1]
    return replace(newest, start=0, arrays=arrays)


def _joined_blocks(pieces: Sequence[LayerSnapshot]) -> LayerSnapshot:
    blocks = [piece.arrays[name] for piece in pieces for name in sorted(piece.arrays)]
    used = ",".join(str(piece.facts["used"]) for piece in pieces)
    return replace(
        pieces[-1],
        start=0,
        facts={"used": used},
        arrays={block_name(index): block for index, block in enumerate(blocks)},
    )


def block_name(index: int) -> str:
    """The name of a block among the arrays of a paged snapshot; names sort as blocks do."""
    return f"block{index:05}"
