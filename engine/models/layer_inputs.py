"""What a layer gets of a token besides the stream: a vector of its own, gated by the stream; and a factor at its end.

Activations are [1, T, hidden] for T packed tokens. Numeric reference: `mlx_lm.models.gemma4_text`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.models.parts import read_norm
from engine.ops.activations import activation

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.models.parts import Layer, Step
    from engine.models.reading import WeightReader


class LayerInputs:
    """The vectors of all layers: those of a table, and a projection of the embedding."""

    def __init__(self, config: ModelConfig, family: Family, reader: WeightReader, width: int) -> None:
        """Take the weights from `reader`; `width` counts the values of one layer's vector."""
        self._shape = (config.layers, width)
        self._table = reader.embedding("model.embed_tokens_per_layer")
        self._projection = reader.linear("model.per_layer_model_projection")
        self._norm = read_norm(reader, config, family, "model.per_layer_projection_norm")
        self._table_scale = math.sqrt(width)
        self._projection_scale = config.hidden_size**-0.5

    def __call__(self, tokens: mx.array, embedded: mx.array) -> mx.array:
        """Vectors [1, T, layers, width] of `tokens` [1, T], whose scaled embeddings are `embedded` [1, T, hidden]."""
        looked_up = self._table(tokens) * self._table_scale
        projected = self._projection(embedded) * self._projection_scale
        normed = self._norm(projected.reshape(*tokens.shape, *self._shape))
        return (normed + looked_up.reshape(*tokens.shape, *self._shape)) * math.sqrt(0.5)


class ConditionedLayer:
    """A layer, then the gated vector of its own, then a factor."""

    def __init__(
        self, inner: Layer, config: ModelConfig, family: Family, reader: WeightReader, *, module: str, layer: int
    ) -> None:
        """Take what `module` has beside `inner` from `reader`."""
        self._inner = inner
        self._layer = layer
        self._is_gated = config.variety is not None and config.variety.input_width > 0
        if self._is_gated:
            self._gate = reader.linear(f"{module}.per_layer_input_gate")
            self._projection = reader.linear(f"{module}.per_layer_projection")
            self._norm = read_norm(reader, config, family, f"{module}.post_per_layer_input_norm")
        self._scalar = reader.vector(f"{module}.layer_scalar")
        self._activation = activation(family.activation, composed=False)

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """The step's tokens `x` [1, T, hidden] after this layer."""
        x = self._inner(x, step)
        if self._is_gated:
            gated = self._activation(self._gate(x)) * step.layer_input(self._layer)
            x = x + self._norm(self._projection(gated))
        return x * self._scalar
