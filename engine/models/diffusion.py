"""A denoising model: an encoder that reads what is settled, and a decoder that proposes a whole canvas at once.

Both are the same layers; only a factor on each layer's result, and what tokens see, tell them apart. One row at a time:
activations are [1, L, hidden]. Nothing is evaluated here. Numeric reference: `mlx_vlm.models.diffusion_gemma`;
source: reference, denoising §2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.families import FAMILIES
from engine.artifacts.family_shapes import encoder_scalar
from engine.contracts.errors import GraphContractError
from engine.contracts.graph import PackedSegment
from engine.models import declarations
from engine.models.diffusion_state import CanvasStep, EncoderState, ReadingStep
from engine.models.mixture import ParallelFeedForward
from engine.models.parts import GatedFeedForward, read_norm
from engine.models.varied_attention import VariedAttention
from engine.models.vision_tower import VisionTower
from engine.ops.exponential import soft_cap
from engine.ops.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.config import Denoising, ModelConfig
    from engine.artifacts.family import Family
    from engine.artifacts.mixtures import Mixture, MixtureRecord
    from engine.contracts.composition import Composition
    from engine.contracts.option_groups import AdapterSelection
    from engine.contracts.rope import RopeConfig
    from engine.contracts.vision import PromptImage
    from engine.models.reading import WeightReader


class DiffusionLayer:
    """x + after(attention(before x)), the same around two feed-forwards side by side, and a factor on the result."""

    __slots__ = ("_after", "_after_attention", "_attention", "_before_attention", "_feed_forward", "_scalars")

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        mixture: tuple[Mixture, MixtureRecord],
        reader: WeightReader,
        composition: Composition,
        *,
        layer: int,
        rope: Rope,
    ) -> None:
        """Take the weights of `layer` from `reader`."""
        module = f"{family.root}.layers.{layer}"
        self._attention = VariedAttention(config, family, reader, module=f"{module}.self_attn", layer=layer, rope=rope)
        self._feed_forward = ParallelFeedForward(*mixture, config, family, reader, composition, layer=module)
        self._before_attention, self._after_attention, self._after = (
            read_norm(reader, config, family, f"{module}.{name}")
            for name in (family.norms.before_mixer, family.norms.after_mixer, family.norms.after_feed_forward)
        )
        self._scalars = reader.vector(f"{module}.layer_scalar"), reader.vector(encoder_scalar(layer))

    def __call__(self, x: mx.array, step: ReadingStep | CanvasStep) -> mx.array:
        """The step's tokens `x` [1, L, hidden] after this layer."""
        x = x + self._after_attention(self._attention(self._before_attention(x), step))
        x = x + self._after(self._feed_forward(x))
        return x * self._scalars[step.encodes]


class SelfConditioning:
    """What a canvas becomes when the step before it is taken into account: norm(x + feed_forward(norm(signal)))."""

    __slots__ = ("_feed_forward", "_norm_eps", "_pre_norm")

    def __init__(self, config: ModelConfig, family: Family, reader: WeightReader, composition: Composition) -> None:
        """Take its weights from `reader`."""
        module = f"{family.root}.self_conditioning"
        self._pre_norm = read_norm(reader, config, family, f"{module}.pre_norm")
        self._feed_forward = GatedFeedForward(reader, family, module, composed=composition.composes_exponentials)
        self._norm_eps = config.norm_eps

    def __call__(self, x: mx.array, signal: mx.array | None) -> mx.array:
        """Condition `x` [1, L, hidden] on `signal`, soft embeddings of the same shape; None means zeros."""
        signal = mx.zeros_like(x) if signal is None else signal.astype(x.dtype)
        return mx.fast.rms_norm(x + self._feed_forward(self._pre_norm(signal)), None, self._norm_eps)


class DiffusionGraph:
    """A resident denoising model. What it says of itself: see `engine.contracts.graph.ResidentGraph`."""

    def __init__(self, config: ModelConfig, reader: WeightReader, composition: Composition) -> None:
        """Take every weight of `config` from `reader`; raises the reader's errors."""
        family = FAMILIES[config.model_type]
        self.model_type = config.model_type
        self.graph_capabilities = declarations.native(config)
        self.geometry = config.geometry()
        self.composition = composition
        self.eos_token_ids = config.eos_token_ids
        self.experts: None = None  # all are resident, and nothing is decided by their use
        self._config = config
        self._denoising, mixture = _required(config, family)
        self._table = reader.embedding(f"{family.root}.embed_tokens")
        self._layers = _read_layers(config, family, mixture, reader, composition)
        self._norm = read_norm(reader, config, family, f"{family.root}.norm")
        self.adapters = reader.adapter_sites
        reader.adapter_sites = None  # no adapter changes how a step is conditioned on the one before
        self._self_conditioning = SelfConditioning(config, family, reader, composition)
        self._tower = (
            None
            if config.vision is None
            else VisionTower(config.vision, reader, composed=composition.composes_exponentials)
        )
        self._head = reader.tied_head(self._table)
        self._weights_bytes = reader.resident_bytes

    @property
    def weights_bytes(self) -> int:
        """Bytes that the resident weights hold, those of mounted adapters included."""
        return self._weights_bytes + (0 if self.adapters is None else self.adapters.nbytes)

    @property
    def canvas_length(self) -> int:
        """Tokens that the model settles at once."""
        return self._denoising.canvas_length

    @property
    def embed_scale(self) -> float:
        """The factor on embeddings: the root of their size."""
        return self._config.scaling.embeddings

    def prefill(
        self, tokens: mx.array, adapters: tuple[AdapterSelection, ...] = (), images: Sequence[PromptImage] = ()
    ) -> EncoderState:
        """A new row's state, in which the prompt `tokens` [1, N] of whole numbers have been read.

        `adapters` are mounted ones, and stay with the row; `images` are as in `extend_prefill`.
        """
        config = self._config
        windows = [config.sliding_window if config.slides(layer) else 0 for layer in range(config.layers)]
        state = EncoderState(windows, adapters)
        self.extend_prefill(tokens, state, images)
        return state

    def extend_prefill(self, tokens: mx.array, state: EncoderState, images: Sequence[PromptImage] = ()) -> None:
        """Read `tokens` [1, N] after all that `state` holds, at the positions that follow.

        `images` are whole, in order, and start at places among `tokens`.
        """
        length = tokens.shape[1]
        step = ReadingStep(
            state,
            length,
            scale=self._config.score_scale,
            composed=self._composes,
            stretches=self._stretches(images),
        )
        self._begin(length, state)
        x = self._with_images(self._read(tokens), images)
        for layer in self._layers:
            x = layer(x, step)
        state.advance(length)

    def decoder_logits(self, canvas: mx.array, state: EncoderState, feedback: mx.array | None) -> mx.array:
        """What the model proposes for every position of a canvas that follows `state`, which stays as it is.

        Args:
            canvas: ids [1, L], whatever is known and whatever is noise.
            state: what the encoder has read.
            feedback: soft embeddings [1, L, hidden] of the step before, None in the first.

        Returns:
            Logits [1, L, V] float32, bounded by the model's cap.
        """
        length = canvas.shape[1]
        step = CanvasStep(state, length, scale=self._config.score_scale, composed=self._composes)
        self._begin(length, state)
        x = self._self_conditioning(self._embedded(canvas), feedback)
        for layer in self._layers:
            x = layer(x, step)
        logits = self._head(self._norm(x)).astype(mx.float32)
        cap = self._config.scaling.logit_softcap
        return soft_cap(logits, cap, composed=self._composes) if cap else logits

    def dequant_embed_weight(self) -> mx.array:
        """The token table [V, hidden], dense: a dense model's own, a quantized one's unpacked anew."""
        return self._table.dense()

    def soft_embeddings(self, probabilities: mx.array, table: mx.array) -> mx.array:
        """The mean embedding of each position.

        Args:
            probabilities: [1, L, V] float32.
            table: what `dequant_embed_weight` gave, [V, hidden].

        Returns:
            [1, L, hidden] in the table's dtype.
        """
        return (probabilities.astype(table.dtype) @ table) * self.embed_scale

    def close(self) -> None:
        """Release the weights."""
        self._layers.clear()
        if self.adapters is not None:
            self.adapters.close()
        del self._table, self._head, self._self_conditioning, self._tower

    @property
    def _composes(self) -> bool:
        return self.composition.composes_exponentials

    def _embedded(self, tokens: mx.array) -> mx.array:
        return self._table(tokens) * self.embed_scale

    def _read(self, tokens: mx.array) -> mx.array:
        """What the encoder reads of `tokens`: padding where an image stands, until it is put there."""
        denoising = self._denoising
        return self._embedded(mx.where(tokens == denoising.image_token_id, denoising.pad_token_id, tokens))

    def _stretches(self, images: Sequence[PromptImage]) -> list[tuple[int, int]]:
        """Where tokens see each other both ways, if those of an image do in this model."""
        vision = self._config.vision
        return [(image.start, image.end) for image in images] if vision is not None and vision.both_ways else []

    def _with_images(self, x: mx.array, images: Sequence[PromptImage]) -> mx.array:
        """Embeddings [1, N, hidden] with what the tower sees in the places of `images`, unscaled."""
        if not images:
            return x
        if self._tower is None:
            raise GraphContractError("the graph is given images, and has no tower that reads them")
        parts, end = [], 0
        for image in images:
            parts += [x[:, end : image.start], self._tower(image.pixels).astype(x.dtype)]
            end = image.end
        return mx.concatenate([*parts, x[:, end:]], axis=1)

    def _begin(self, length: int, state: EncoderState) -> None:
        """A pass over `length` tokens follows, with the row's adapters."""
        if self.adapters is not None:
            self.adapters.begin([PackedSegment(length, (), state.adapters)])


def _read_layers(
    config: ModelConfig,
    family: Family,
    mixture: tuple[Mixture, MixtureRecord],
    reader: WeightReader,
    composition: Composition,
) -> list[DiffusionLayer]:
    ropes: dict[RopeConfig, Rope] = {}
    layers = []
    for layer, rope in enumerate(config.layer_ropes):
        if rope is None:
            raise GraphContractError(f"layer {layer} of a {config.model_type} model must rotate")
        shared = ropes.setdefault(rope, Rope(rope, composed=composition.composes_exponentials))
        layers.append(DiffusionLayer(config, family, mixture, reader, composition, layer=layer, rope=shared))
    return layers


def _required(config: ModelConfig, family: Family) -> tuple[Denoising, tuple[Mixture, MixtureRecord]]:
    """What every configuration of a denoising family has."""
    if config.denoising is None or config.mixture is None or family.mixture is None:
        raise GraphContractError(f"a {config.model_type} model has no canvas or no experts")
    return config.denoising, (config.mixture, family.mixture)
