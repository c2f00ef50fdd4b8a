"""Linear attention by the gated delta rule: each row's past is one matrix for each head, whatever its length.

Activations are [1, T, hidden] for T packed tokens. Numeric reference: `mlx_lm.models.qwen3_5`.
Source: Yang et al. 2024, "Gated Delta Networks".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.activations import gated
from engine.ops.packed_recurrence import RecurrentTokens

if TYPE_CHECKING:
    from engine.contracts.composition import Composition
    from engine.contracts.graph import RecurrentGeometry
    from engine.models.parts import Step
    from engine.models.reading import WeightReader


class GatedDeltaMixer:
    """One layer; queries, keys, values, the output's gate, decays and strengths share one product."""

    def __init__(
        self,
        sizes: RecurrentGeometry,
        reader: WeightReader,
        composition: Composition,
        *,
        module: str,
        layer: int,
        norm_eps: float,
    ) -> None:
        """Take the weights of `module` from `reader`; `layer` is the index of its state in a row's caches."""
        self._sizes = sizes
        self._layer = layer
        self._norm_eps = norm_eps
        self._inputs = reader.linear(*(f"{module}.in_proj_{part}" for part in ("qkv", "z", "b", "a")))
        self._kernel = reader.depthwise_kernel(f"{module}.conv1d.weight")
        self._rates = -mx.exp(reader.precise_vector(f"{module}.A_log"))
        self._rate_bias = reader.precise_vector(f"{module}.dt_bias")
        self._gain = reader.vector(f"{module}.norm.weight")
        self._output = reader.linear(f"{module}.out_proj")
        self._gated = gated("silu", composed=composition.composes_exponentials)

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """Mix the step's tokens `x` [1, T, hidden], each with its own row's past; moves the rows' states on."""
        sizes = self._sizes
        values = sizes.value_heads * sizes.value_dim
        bounds = [sizes.channels, sizes.channels + values, sizes.channels + values + sizes.value_heads]
        channels, gate, strengths, steps = mx.split(self._inputs(x).squeeze(0), bounds, axis=-1)
        pace = steps.astype(mx.float32) + self._rate_bias
        tokens = RecurrentTokens(
            channels=channels,
            log_decays=self._rates * mx.logaddexp(pace, mx.zeros_like(pace)),
            strengths=mx.sigmoid(strengths),
        )
        read = step.recurrence(sizes)(tokens, self._kernel, layer=self._layer)
        normed = mx.fast.rms_norm(read, self._gain, self._norm_eps).flatten(1)
        mixed = self._gated(gate.astype(mx.float32), normed.astype(mx.float32)).astype(x.dtype)
        return self._output(mixed[None])
