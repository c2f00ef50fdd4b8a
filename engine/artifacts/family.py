"""What one family of decoder models can differ in: names of tensors, norms, biases, defaults of fields.

The graph is built from a record, and so are the shapes that weights are checked against, so that no fact is written
twice. The records themselves are in `families`. Reads no file, imports no mlx.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.mixtures import MixtureRecord
    from engine.contracts.graph import Method

Norm = Literal["rms", "rms_plus_one", "rms_as_stored", "layer"]
HeadNorm = Literal["none", "each", "all"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
Sliding = Literal[
    "stated",
    "throughout",
    "in_use",
    "alternating",
    "pattern",
    "upper_layers",
    "unrotated",
    "all_but_sixth_and_last",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNorms:
    """The norms around the two parts of a layer, by module name; "" where a family has none.

    x + after_mixer(mixer(before_mixer(x))), and the same around the feed-forward.
    """

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one family apart; the values here are llama's.

    Attributes:
        name: the family's own name, that of `ModelConfig.model_type`.
        method: how its models generate.
        root: the module that holds the layers, the token table and the last norm.
        defaults: fields that its configuration files may leave out.
        norm: the kind of all norms; "rms_plus_one" stores gains less one, and "rms_as_stored" does so in original files
            alone: MLX adds the one when it converts them.
        norms: which norms stand around a layer's parts.
        query_key_value: the projections whose joined results are queries, keys and values.
        head_norms: norms of queries and keys: over each head, over all heads of a token, or none.
        feed_forward: the projections whose joined results are gate and up, or the one inner result where not gated.
        gated: whether the activated gate multiplies up.
        down: the projection back.
        activation: of the gate, or of the inner result.
        activation_names: what its configuration files may call that.
        attention_bias, output_bias, mlp_bias: the field that says whether these projections have additive biases,
            or a fixed answer.
        norm_eps: the field of the norms' epsilon.
        sliding: which layers slide where no `layer_types` are stated.
        embedding_scale: the factor on embeddings where no `embedding_multiplier` is stated: the root of their size,
            perhaps rounded to bfloat16.
        clips_sums: whether sums in float16 are kept within its range, which this family's activations leave.
        multimodal: whether its checkpoints may be the text half of multimodal ones, towers beside it.
        dropped: beginnings of names of other stored tensors that are not served.
        kept: endings of names that are served all the same.
        tower: beginnings of names of a tower that sees images, which is served where the configuration describes it.
        mixture: how layers hold experts, where they do.
        recurrent: whether layers may attend linearly, by the gated delta rule.
        varied: whether layers may differ in more than their kind: sizes, shared keys and values, inputs of their own;
            values are then normed, and a layer's result is multiplied by a number of its own.
        served: fields of its own that change the computation, and the values that the graph follows.
        gates_attention: whether each head's query projection also gives a gate of that head's output.
    """

    name: str
    method: Method = "autoregressive"
    root: str = "model"
    defaults: Mapping[str, object] = field(default_factory=dict)
    norm: Norm = "rms"
    norms: BlockNorms = BlockNorms()
    query_key_value: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    head_norms: HeadNorm = "none"
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
    activation: Activation = "silu"
    activation_names: tuple[str, ...] = ("silu", "swish")
    attention_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    norm_eps: str = "rms_norm_eps"
    sliding: Sliding = "stated"
    embedding_scale: Literal["one", "root", "root_bfloat16"] = "one"
    clips_sums: bool = False
    multimodal: bool = False
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()
    mixture: MixtureRecord | None = None
    recurrent: bool = False
    served: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    gates_attention: bool = False
    varied: bool = False
