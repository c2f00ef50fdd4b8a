"""Self-attention of packed tokens: grouped queries, perhaps normed, perhaps rotated, against each row's own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.models.parts import read_norm

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.models.parts import Step
    from engine.models.reading import WeightReader
    from engine.ops.rope import Rope


class SelfAttention:
    """One layer's attention; query, key and value share one product."""

    def __init__(
        self, config: ModelConfig, family: Family, reader: WeightReader, *, module: str, layer: int, rope: Rope | None
    ) -> None:
        """Take the weights of `module` from `reader`; `rope` None leaves queries and keys as they are."""
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        self._layer = layer
        self._rope = rope
        self._query_key_value = reader.projection(*(f"{module}.{name}" for name in family.query_key_value))
        self._norms = [
            read_norm(reader, config, family, f"{module}.{name}")
            for name in (() if family.head_norms == "none" else ("q_norm", "k_norm"))
        ]
        self._gates = family.gates_attention
        self._norms_all_heads = family.head_norms == "all"
        self._output = reader.projection(f"{module}.o_proj")

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """Attend with the step's tokens `x` [1, T, hidden]; appends their keys and values."""
        heads, rotated_heads = self._heads, self._heads + self._kv_heads
        product = self._query_key_value(x)
        gate = None
        if self._gates:
            product, gate = self._parted(product.reshape(-1, product.shape[-1]))
        joined = product.reshape(-1, rotated_heads + self._kv_heads, 1, self._head_dim)
        rotated = (
            self._normed(joined[:, :heads], joined[:, heads:rotated_heads])
            if self._norms
            else joined[:, :rotated_heads]
        )
        if self._rope is not None:
            rotated = step.rotation(self._rope)(rotated)
        mixed = step.attention(rotated[:, :heads], rotated[:, heads:], joined[:, rotated_heads:], layer=self._layer)
        return self._output(mixed if gate is None else mixed * mx.sigmoid(gate))

    def _parted(self, product: mx.array) -> tuple[mx.array, mx.array]:
        """The product without the gates that follow each head's query, and those gates [1, T, H·D]."""
        width = 2 * self._heads * self._head_dim
        queries, gates = mx.split(product[:, :width].reshape(-1, self._heads, 2 * self._head_dim), 2, axis=-1)
        return mx.concatenate([queries.flatten(1), product[:, width:]], axis=-1), gates.flatten(1)[None]

    def _normed(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Queries and keys [T, .., 1, D] after their norms, joined."""
        parts = []
        for norm, part in zip(self._norms, (queries, keys), strict=True):
            if self._norms_all_heads:
                parts.append(norm(part.reshape(part.shape[0], -1)).reshape(part.shape))
            else:
                parts.append(norm(part))
        return mx.concatenate(parts, axis=1)
