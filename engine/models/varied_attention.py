"""Self-attention of layers that differ in their heads' sizes, norm their values, and may attend to another's keys.

Numeric reference: `mlx_lm.models.gemma4_text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.models.parts import read_norm

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.models.parts import AttendingStep, Step
    from engine.models.reading import WeightReader
    from engine.ops.rope import Rope


class VariedAttention:
    """One layer's attention to keys and values of its own; query, key and value share one product."""

    def __init__(
        self, config: ModelConfig, family: Family, reader: WeightReader, *, module: str, layer: int, rope: Rope
    ) -> None:
        """Take the weights of `module` from `reader`."""
        self._heads, self._kv_heads = config.heads, config.kv_heads_of(layer)
        self._head_dim = config.head_dim_of(layer)
        self._layer = layer
        self._rope = rope
        self._norm_eps = config.norm_eps
        self._keys_are_values = config.keys_are_values(layer)
        self._is_donor = any(config.donor(other) == layer for other in range(layer + 1, config.layers))
        names = ("q_proj", "k_proj") if self._keys_are_values else ("q_proj", "k_proj", "v_proj")
        self._query_key_value = reader.projection(*(f"{module}.{name}" for name in names))
        self._query_norm = read_norm(reader, config, family, f"{module}.q_norm")
        self._key_norm = read_norm(reader, config, family, f"{module}.k_norm")
        self._output = reader.projection(f"{module}.o_proj")

    def __call__(self, x: mx.array, step: AttendingStep) -> mx.array:
        """Attend with the step's tokens `x` [1, T, hidden]; appends their keys and values."""
        joined = self._query_key_value(x)
        joined = joined.reshape(x.shape[1], -1, 1, self._head_dim)
        rotated_heads = self._heads + self._kv_heads
        keys = joined[:, self._heads : rotated_heads]
        values = keys if self._keys_are_values else joined[:, rotated_heads:]
        rotated = step.rotation(self._rope)(
            mx.concatenate([self._query_norm(joined[:, : self._heads]), self._key_norm(keys)], axis=1)
        )
        mixed = step.attention(
            rotated[:, : self._heads],
            rotated[:, self._heads :],
            mx.fast.rms_norm(values, None, self._norm_eps),
            layer=self._layer,
            kept=self._is_donor,
        )
        return self._output(mixed)


class BorrowingAttention:
    """One layer's attention to the keys and values of an earlier one."""

    def __init__(
        self, config: ModelConfig, family: Family, reader: WeightReader, *, module: str, layer: int, rope: Rope
    ) -> None:
        """Take the weights of `module` from `reader`."""
        self._heads, self._head_dim = config.heads, config.head_dim_of(layer)
        self._donor = config.donor(layer)
        self._rope = rope
        self._query = reader.projection(f"{module}.q_proj")
        self._query_norm = read_norm(reader, config, family, f"{module}.q_norm")
        self._output = reader.projection(f"{module}.o_proj")

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """Attend with the step's tokens `x` [1, T, hidden] to what the donor has appended in this step."""
        queries = self._query_norm(self._query(x).reshape(-1, self._heads, 1, self._head_dim))
        return self._output(step.attention.again(step.rotation(self._rope)(queries), layer=self._donor))
