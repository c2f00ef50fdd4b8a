"""The typed configuration of a model, whatever files it was read from.

Grows by families: what only some of them need gets its own record here, never a loose dictionary. Sizes are counts
of values, `context_length` and `sliding_window` are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.artifacts.layer_variety import LayerVariety
from engine.artifacts.mixtures import Mixture
from engine.artifacts.quantization import QuantizationConfig, QuantizationScheme
from engine.artifacts.vision_fields import Vision
from engine.contracts.graph import LINEAR_ATTENTION, GraphGeometry, Method, RecurrentGeometry
from engine.contracts.options import OptionDefaults
from engine.contracts.rope import RopeConfig, RopeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
MOST_LAYERS = 4096

__all__ = [
    "FULL_ATTENTION",
    "MOST_LAYERS",
    "SLIDING_ATTENTION",
    "Denoising",
    "ModelConfig",
    "QuantizationConfig",
    "QuantizationScheme",
    "RopeConfig",
    "RopeKind",
    "Scaling",
    "union_of_ids",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Factors and bounds on the way through a graph.

    `scores` is the factor on attention scores, None for the root of the head size; `logits` divides. A `softcap`
    bounds by tanh, and 0 means none.
    """

    embeddings: float = 1.0
    residuals: float = 1.0
    scores: float | None = None
    score_softcap: float = 0.0
    logits: float = 1.0
    logit_softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """What a denoising model has besides: the tokens that it settles at once, and the id that stands for an image.

    Where no image is given, an encoder reads `pad_token_id` in the place of `image_token_id`.
    """

    canvas_length: int
    image_token_id: int
    pad_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a graph needs to be built, and what the text layer needs to know about its model.

    `model_type` names the graph's family, after aliases. `layer_types` has one entry per layer; `sliding_window`
    is 0 when no layer slides. `layer_ropes` has one entry per layer, None for one that does not rotate.
    `attention_bias` is of queries, keys and values. `stored_dtype` is the dtype that the files state for dense
    weights, "" if none. `option_defaults` are the model's own, from `generation_config.json`. `mixture` describes the
    experts of a model that has some, `recurrent` the state of layers that attend linearly. `gains_less_one`: the norms'
    gains are stored so. `variety` is of models whose layers differ in more than their kind; `kv_heads` and `head_dim`
    are then those of sliding layers. `denoising` is of models that settle many tokens at once, `vision` of models that
    see images, with a tower of their own.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    layer_types: tuple[str, ...]
    layer_ropes: tuple[RopeConfig | None, ...]
    sliding_window: int = 0
    scaling: Scaling = field(default_factory=Scaling)
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: QuantizationConfig | None = None
    option_defaults: OptionDefaults = field(default_factory=OptionDefaults)
    stored_dtype: str = ""
    mixture: Mixture | None = None
    recurrent: RecurrentGeometry | None = None
    gains_less_one: bool = False
    variety: LayerVariety | None = None
    denoising: Denoising | None = None
    vision: Vision | None = None

    @property
    def method(self) -> Method:
        """How the model generates."""
        return "autoregressive" if self.denoising is None else "denoising"

    @property
    def score_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.scaling.scores is None else self.scaling.scores

    def geometry(self) -> GraphGeometry:
        """The sizes that policies read."""
        return GraphGeometry(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            context_length=self.context_length,
            layer_types=self.layer_types,
            sliding_window=self.sliding_window,
            layer_key_values=self._layer_key_values(),
            recurrent=self.recurrent,
            canvas_length=0 if self.denoising is None else self.denoising.canvas_length,
            vision=None if self.vision is None else self.vision.geometry,
        )

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` sends tokens through experts."""
        return self.mixture is not None and layer in self.mixture.layers

    def slides(self, layer: int) -> bool:
        """Whether tokens in `layer` see a window alone."""
        return self.layer_types[layer] == SLIDING_ATTENTION

    def kv_heads_of(self, layer: int) -> int:
        """Key/value heads of `layer`."""
        return self.variety.full_kv_heads if self.variety and self._is_full(layer) else self.kv_heads

    def head_dim_of(self, layer: int) -> int:
        """The size of one head in `layer`."""
        return self.variety.full_head_dim if self.variety and self._is_full(layer) else self.head_dim

    def keys_are_values(self, layer: int) -> bool:
        """Whether `layer` has no value projection."""
        return self.variety is not None and self.variety.keys_are_values and self._is_full(layer)

    def donor(self, layer: int) -> int:
        """The layer whose keys and values `layer` attends to: its own, or the last of its kind that keeps some."""
        own = self.layers - (self.variety.sharing_layers if self.variety else 0)
        if layer < own:
            return layer
        return next(other for other in range(own - 1, -1, -1) if self.layer_types[other] == self.layer_types[layer])

    def intermediate_size_of(self, layer: int) -> int:
        """The inner size of the dense feed-forward of `layer`."""
        wide = self.variety is not None and self.variety.wide_when_sharing and self.donor(layer) != layer
        return self.intermediate_size * (2 if wide else 1)

    def _is_full(self, layer: int) -> bool:
        return self.layer_types[layer] == FULL_ATTENTION

    def _layer_key_values(self) -> tuple[int, ...]:
        """See `GraphGeometry.layer_key_values`."""
        if self.variety is None and LINEAR_ATTENTION not in self.layer_types:
            return ()
        return tuple(
            0
            if kind == LINEAR_ATTENTION or self.donor(layer) != layer
            else self.kv_heads_of(layer) * self.head_dim_of(layer)
            for layer, kind in enumerate(self.layer_types)
        )


def union_of_ids(*sources: Iterable[int]) -> tuple[int, ...]:
    """Every id once, in the order of first mention."""
    return tuple(dict.fromkeys(token for source in sources for token in source))
