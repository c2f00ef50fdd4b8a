"""Snapshots of keys and values in the activations' dtype, whatever storage held them. Units: tokens."""

from __future__ import annotations

import mlx.core as mx

from engine.contracts.snapshot import LayerSnapshot

PLAIN = "plain"


def plain_snapshot(keys: mx.array, values: mx.array) -> LayerSnapshot:
    """A settled copy of keys and values [1, Hkv, N, D].

    Raises:
        ValueError: no token is held.
    """
    if not keys.shape[2]:
        raise ValueError("a cache that holds no token has no snapshot")
    # Evaluated now: as long as a graph held the row's storage, each of its appends would copy all of it.
    copies = [mx.contiguous(held) for held in (keys, values)]
    mx.eval(copies)
    return LayerSnapshot(kind=PLAIN, tokens=keys.shape[2], arrays=dict(zip(("keys", "values"), copies, strict=True)))


def read_plain_snapshot(snapshot: LayerSnapshot, tokens: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, Hkv, tokens, D] of the first `tokens`.

    Raises:
        ValueError: the snapshot is of another kind, or cannot be cut to `tokens`.
    """
    check_cut(snapshot, PLAIN, tokens)
    return snapshot.arrays["keys"][:, :, :tokens], snapshot.arrays["values"][:, :, :tokens]


def check_cut(snapshot: LayerSnapshot, kind: str, tokens: int) -> None:
    """Raise `ValueError` unless `snapshot` is of `kind` and can be cut to `tokens`."""
    if snapshot.kind != kind:
        raise ValueError(f"a snapshot of kind {snapshot.kind!r} does not fill a cache of kind {kind!r}")
    if not max(1, snapshot.least_tokens) <= tokens <= snapshot.tokens:
        raise ValueError(f"a snapshot of {snapshot.tokens} tokens cannot be cut to {tokens}")
