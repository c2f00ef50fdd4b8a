"""A decoder model as a packed graph: layers of a mixer and a feed-forward, as a family's record says.

Activations are [1, T, hidden] for T packed tokens. Numeric reference: `mlx_lm.models`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.families import FAMILIES
from engine.contracts.graph import LINEAR_ATTENTION
from engine.models import declarations
from engine.models.layer_inputs import ConditionedLayer, LayerInputs
from engine.models.mixture import ParallelFeedForward, RoutedFeedForward
from engine.models.parts import GatedFeedForward, PlainFeedForward, Step, read_norm
from engine.models.self_attention import SelfAttention
from engine.models.varied_attention import BorrowingAttention, VariedAttention
from engine.ops.exponential import soft_cap
from engine.ops.rope import Rope
from engine.runtime.host_kernels import HostKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.contracts.composition import Composition
    from engine.contracts.graph import PackedSegment
    from engine.contracts.rope import RopeConfig
    from engine.models.parts import FeedForward, Layer, Mixer
    from engine.models.reading import WeightReader

_LARGEST_FLOAT16 = 65504.0


class DecoderLayer:
    """x + after(mixer(before x)), then the same around the feed-forward; the sums' second parts may be scaled."""

    __slots__ = ("_clips_sums", "_feed_forward", "_feed_forward_norms", "_mixer", "_mixer_norms", "_residuals")

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        reader: WeightReader,
        *,
        module: str,
        mixer: Mixer,
        feed_forward: FeedForward,
        norms_feed_forward: bool = True,
    ) -> None:
        """Take the norms of `module` from `reader`, and join the parts.

        `norms_feed_forward` False leaves the norm before the feed-forward to that itself.
        """

        def norm(name: str) -> Callable[[mx.array], mx.array]:
            return read_norm(reader, config, family, f"{module}.{name}") if name else _unchanged

        self._mixer = mixer
        self._feed_forward = feed_forward
        self._mixer_norms = norm(family.norms.before_mixer), norm(family.norms.after_mixer)
        before = family.norms.before_feed_forward if norms_feed_forward else ""
        self._feed_forward_norms = norm(before), norm(family.norms.after_feed_forward)
        self._residuals = config.scaling.residuals
        self._clips_sums = family.clips_sums

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """The step's tokens `x` [1, T, hidden] after this layer."""
        before, after = self._mixer_norms
        x = self._added(x, after(self._mixer(before(x), step)))
        before, after = self._feed_forward_norms
        return self._added(x, after(self._feed_forward(before(x))))

    def _added(self, x: mx.array, part: mx.array) -> mx.array:
        if self._clips_sums and x.dtype == mx.float16:
            total = x.astype(mx.float32) + part.astype(mx.float32)
            return mx.clip(total, -_LARGEST_FLOAT16, _LARGEST_FLOAT16).astype(mx.float16)
        return x + (part if self._residuals == 1.0 else part * self._residuals)


class DecoderGraph:
    """A resident decoder model. What it says of itself: see `engine.contracts.graph.ResidentGraph`."""

    def __init__(self, config: ModelConfig, reader: WeightReader, composition: Composition) -> None:
        """Take every weight of `config` from `reader`; raises the reader's errors."""
        family = FAMILIES[config.model_type]
        self.model_type = config.model_type
        self.graph_capabilities = declarations.DECODER
        self.geometry = config.geometry()
        self.composition = composition
        self.eos_token_ids = config.eos_token_ids
        self.experts: None = None  # all are resident, and nothing is decided by their use
        self._config = config
        self._table = reader.embedding("model.embed_tokens")
        width = config.variety.input_width if config.variety else 0
        self._layer_inputs = LayerInputs(config, family, reader, width) if width else None
        ropes = _ropes(config, composition)
        self._kernels = HostKernels.of_this_process() if composition.computes_on_host else None
        self._layers = [
            _read_layer(config, family, reader, composition, ropes, layer) for layer in range(config.layers)
        ]
        self._norm = read_norm(reader, config, family, "model.norm")
        self._head = reader.tied_head(self._table) if config.tie_word_embeddings else reader.linear("lm_head")
        self._weights_bytes = reader.resident_bytes
        self.adapters = reader.adapter_sites

    @property
    def weights_bytes(self) -> int:
        """Bytes that the resident weights hold, those of mounted adapters included."""
        return self._weights_bytes + (0 if self.adapters is None else self.adapters.nbytes)

    def hidden(self, tokens: mx.array, segments: Sequence[PackedSegment]) -> mx.array:
        """Final hidden states [1, T, hidden] of packed `tokens` [1, T]; appends to each segment's caches."""
        scaling = self._config.scaling
        if self.adapters is not None:
            self.adapters.begin(segments)
        step = Step(segments, scale=self._config.score_scale, softcap=scaling.score_softcap, kernels=self._kernels)
        x = self._table(tokens)
        if scaling.embeddings != 1.0:
            x = x * scaling.embeddings
        if self._layer_inputs is not None:
            step.layer_inputs = self._layer_inputs(tokens, x)
        for layer in self._layers:
            x = layer(x, step)
        return self._norm(x)

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [1, P, V] of selected hidden states [1, P, hidden]."""
        scaling = self._config.scaling
        logits = self._head(hidden)
        if scaling.logits != 1.0:
            logits = logits / scaling.logits
        if scaling.logit_softcap:
            composed = self.composition.composes_exponentials
            logits = soft_cap(logits, scaling.logit_softcap, composed=composed)
        return logits

    def close(self) -> None:
        """Release the weights."""
        self._layers.clear()
        if self.adapters is not None:
            self.adapters.close()
        del self._table, self._head, self._layer_inputs


def _read_layer(
    config: ModelConfig,
    family: Family,
    reader: WeightReader,
    composition: Composition,
    ropes: Mapping[RopeConfig | None, Rope | None],
    layer: int,
) -> Layer:
    """Layer number `layer`: the place where its mixer and its feed-forward are chosen."""
    module = f"model.layers.{layer}"
    mixer = _read_mixer(config, family, reader, composition, ropes[config.layer_ropes[layer]], layer)
    feed_forward = _read_feed_forward(config, family, reader, composition, layer=layer)
    inner = DecoderLayer(
        config,
        family,
        reader,
        module=module,
        mixer=mixer,
        feed_forward=feed_forward,
        norms_feed_forward=not (family.mixture is not None and family.mixture.beside and config.has_experts(layer)),
    )
    return ConditionedLayer(inner, config, family, reader, module=module, layer=layer) if family.varied else inner


def _read_mixer(
    config: ModelConfig, family: Family, reader: WeightReader, composition: Composition, rope: Rope | None, layer: int
) -> Mixer:
    module = f"model.layers.{layer}"
    if config.recurrent is not None and config.layer_types[layer] == LINEAR_ATTENTION:
        from engine.models.gated_delta_mixer import GatedDeltaMixer  # few families have any

        return GatedDeltaMixer(
            config.recurrent,
            reader,
            composition,
            module=f"{module}.linear_attn",
            layer=layer,
            norm_eps=config.norm_eps,
        )
    if config.variety is not None and rope is not None:
        kind = VariedAttention if config.donor(layer) == layer else BorrowingAttention
        return kind(config, family, reader, module=f"{module}.self_attn", layer=layer, rope=rope)
    return SelfAttention(config, family, reader, module=f"{module}.self_attn", layer=layer, rope=rope)


def _read_feed_forward(
    config: ModelConfig, family: Family, reader: WeightReader, composition: Composition, *, layer: int
) -> FeedForward:
    module = f"model.layers.{layer}"
    if config.mixture is not None and family.mixture is not None and config.has_experts(layer):
        if family.mixture.beside:
            return ParallelFeedForward(
                config.mixture, family.mixture, config, family, reader, composition, layer=module
            )
        return RoutedFeedForward(config.mixture, family.mixture, family, reader, composition, layer=module)
    composed = composition.composes_exponentials
    if not family.gated:
        return PlainFeedForward(reader, family, f"{module}.mlp", composed=composed)
    kernels = HostKernels.of_this_process() if composition.computes_on_host else None
    return GatedFeedForward(reader, family, f"{module}.mlp", composed=composed, kernels=kernels)


def _ropes(config: ModelConfig, composition: Composition) -> dict[RopeConfig | None, Rope | None]:
    """Each way of rotating once, so that layers which rotate alike share their step's tables."""
    return {
        rope: None if rope is None else Rope(rope, composed=composition.composes_exponentials)
        for rope in config.layer_ropes
    }


def _unchanged(x: mx.array) -> mx.array:
    return x
