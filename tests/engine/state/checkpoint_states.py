"""Small checkpoints to write: facts, and layers that add to each other, filled with numbers that tell them apart."""

import mlx.core as mx

from engine.contracts.durability import CheckpointFacts, DurableIdentity
from engine.contracts.snapshot import LayerSnapshot
from engine.state.state_arrays import to_host

GENERATION = "0123456789abcdef" * 2
KEY = "fe" * 32
IDENTITY = DurableIdentity(model="m", weights="w", tokenizer="t", kv_storage="k", adapters="[]", arithmetic="a")


def facts(state_tokens, *, prompt_tokens=4, seed=9):
    return CheckpointFacts(
        identity=IDENTITY,
        tokens=tuple(range(100, 101 + state_tokens)),
        prompt_tokens=prompt_tokens,
        seed=seed,
        seed_was_explicit=False,
    )


def added(start, tokens, layer=0, *, width=4):
    """Keys and values of tokens from `start` to `tokens`; each number is its token's place and its layer."""
    column = mx.arange(start, tokens, dtype=mx.float32)[None, None, :, None] + 1000.0 * layer
    keys = mx.broadcast_to(column, (1, 2, tokens - start, width))
    return LayerSnapshot(kind="plain", start=start, tokens=tokens, arrays={"keys": keys + 0.0, "values": keys + 0.5})


def whole(tokens):
    """A state that is no row of tokens."""
    array = mx.full((1, 3, 5), float(tokens))
    return LayerSnapshot(kind="recurrent", tokens=tokens, least_tokens=tokens, arrays={"tail": array})


def layers(start, tokens):
    return [added(start, tokens, 0), whole(tokens), added(start, tokens, 2)]


def hosted(snapshots):
    return list(zip(snapshots, to_host(snapshots), strict=True))
