"""The oracle of every cache kind: lists of positions, and attention over all of them."""

import mlx.core as mx
import numpy as np

from engine.contracts.graph import GraphGeometry
from engine.ops.attention import causal_attention

HEADS, KV_HEADS = 4, 2


def random_tokens(generator, count, dim):
    """Queries, keys and values of `count` tokens."""
    return [
        mx.array(generator.normal(size=(1, heads, count, dim)).astype(np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def full_attention(layers, dim):
    """The geometry of a graph whose layers all see everything."""
    return GraphGeometry(
        vocab_size=4,
        hidden_size=HEADS * dim,
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=dim,
        context_length=4096,
        layer_types=("full_attention",) * layers,
    )


class KeepsEverything:
    """Positions as they were given; once `convert` was called, a codec's idea of them is attended to."""

    def __init__(self, *, dim, window=0, composed=True, codec=None, start=0):
        self.window, self.composed, self.codec, self.start = window, composed, codec, start
        self.keys = self.values = np.zeros((1, KV_HEADS, 0, dim), np.float32)
        self.converted = False

    @property
    def offset(self):
        return self.keys.shape[2]

    def attend(self, queries, keys, values, *, scale):
        self.keys, self.values = (
            np.concatenate([held, np.array(new)], axis=2) for held, new in ((self.keys, keys), (self.values, values))
        )
        held = mx.array(self.keys), mx.array(self.values)
        if self.converted:
            held = self.codec.decode(self.codec.encode(*held))
        return causal_attention(queries, *held, scale=scale, window=self.window, composed=self.composed)

    def maintain(self):
        self.converted = self.converted or (self.codec is not None and self.offset >= max(1, self.start))

    def cut(self, tokens):
        self.keys, self.values = self.keys[:, :, :tokens], self.values[:, :, :tokens]
