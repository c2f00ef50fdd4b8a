"""A feed-forward of routed experts: a router, and for each token the weighted sum of a few of many gated products.

Activations are [1, T, hidden] for T packed tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.mixtures import BESIDE_NORMS, expert_tensors, module_of
from engine.contracts.errors import ConfigurationError
from engine.models.parts import GatedFeedForward, RmsNorm, read_norm
from engine.ops.activations import gated
from engine.ops.experts import GatedExperts, Routing, route_by_scores, route_by_shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.artifacts.mixtures import Mixture, MixtureRecord
    from engine.contracts.composition import Composition
    from engine.models.reading import WeightReader


class RoutedFeedForward:
    """Σ weight · down(activation(gate x) · up x) over the experts that a router chooses."""

    def __init__(
        self,
        mixture: Mixture,
        record: MixtureRecord,
        family: Family,
        reader: WeightReader,
        composition: Composition,
        *,
        layer: str,
    ) -> None:
        """Take the weights of `layer`, such as "model.layers.0", from `reader`.

        Raises:
            ConfigurationError: dense experts would be held in 16 bits on a CPU, for which there is no product.
            ArtifactError: what the reader says.
        """
        module = module_of(record, layer)
        self._mixture = mixture
        self._weighing = record.weighing
        self._router = reader.linear(f"{module}.{record.router}")
        self._experts = read_experts(mixture, record, family, reader, composition, module=module)
        self._shared = (
            SharedExpert(reader, family, f"{module}.{record.shared}", composed=composition.composes_exponentials)
            if record.shared
            else None
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""
        routed = self._experts(x.squeeze(0), self._routing(x))[None]
        return routed if self._shared is None else routed + self._shared(x)

    def _routing(self, x: mx.array) -> Routing:
        scores = self._router(x).squeeze(0)
        if self._weighing == "scores":
            return route_by_scores(scores, self._mixture.chosen)
        return route_by_shares(scores, self._mixture.chosen, normalised=self._mixture.normalised)


class ParallelFeedForward:
    """A dense feed-forward and routed experts side by side, each between norms of its own.

    The router sees the stream before any of those norms, normed and scaled in its own way.
    """

    def __init__(
        self,
        mixture: Mixture,
        record: MixtureRecord,
        config: ModelConfig,
        family: Family,
        reader: WeightReader,
        composition: Composition,
        *,
        layer: str,
    ) -> None:
        """Take the weights of `layer` from `reader`; raises what `RoutedFeedForward` does."""
        self._chosen = mixture.chosen
        self._dense = GatedFeedForward(reader, family, f"{layer}.mlp", composed=composition.composes_exponentials)
        self._before_dense = read_norm(reader, config, family, f"{layer}.{family.norms.before_feed_forward}")
        self._after_dense, self._before_experts, self._after_experts = (
            read_norm(reader, config, family, f"{layer}.{name}") for name in BESIDE_NORMS
        )
        self._router = reader.linear(f"{layer}.{record.router}")
        self._scaled = _router_norm(config, reader.vector(f"{layer}.router.scale"), apart=record.scales_apart)
        self._from_the_end = record.scales_apart
        self._expert_scales = reader.vector(f"{layer}.router.per_expert_scale")
        self._experts = read_experts(mixture, record, family, reader, composition, module=module_of(record, layer))

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""
        dense = self._after_dense(self._dense(self._before_dense(x)))
        scores = self._router(self._scaled(x)).squeeze(0)
        chosen = route_by_scores(scores, self._chosen, from_the_end=self._from_the_end)
        routing = Routing(chosen.experts, chosen.weights * self._expert_scales[chosen.experts])
        return dense + self._after_experts(self._experts(self._before_experts(x).squeeze(0), routing)[None])


def _router_norm(config: ModelConfig, scale: mx.array, *, apart: bool) -> Callable[[mx.array], mx.array]:
    """The norm before a router, with `scale` and the size's root as its gain or, `apart`, as products of their own.

    They round differently in 16 bits.
    """
    root = config.hidden_size**-0.5
    if not apart:
        return RmsNorm(scale * root, config.norm_eps)
    return lambda x: mx.fast.rms_norm(x, None, config.norm_eps) * scale * root


class SharedExpert:
    """An expert that every token uses: sigmoid(gate x) times a gated feed-forward."""

    def __init__(self, reader: WeightReader, family: Family, module: str, *, composed: bool) -> None:
        """Take the weights of `module`, and of its gate beside it, from `reader`."""
        self._feed_forward = GatedFeedForward(reader, family, module, composed=composed)
        self._gate = reader.linear(f"{module}_gate")

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""
        return mx.sigmoid(self._gate(x)) * self._feed_forward(x)


def read_experts(
    mixture: Mixture,
    record: MixtureRecord,
    family: Family,
    reader: WeightReader,
    composition: Composition,
    *,
    module: str,
) -> GatedExperts:
    """The experts of `module`, in whichever form they are stored. Raises what `RoutedFeedForward` does."""
    names = expert_tensors(record, module, mixture.experts, reader)
    if reader.holds_dense(names.down[0]) and composition.device == "cpu" and composition.compute_dtype != "float32":
        raise ConfigurationError(
            "compute_dtype", f"experts cannot be computed in {composition.compute_dtype} on a CPU; choose float32"
        )
    return GatedExperts(
        reader.experts(*names.gate_up),
        reader.experts(names.down),
        gated(family.activation, composed=composition.composes_exponentials),
        sorts=composition.row_tile_tokens is None,
    )
