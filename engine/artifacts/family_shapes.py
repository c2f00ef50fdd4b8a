"""The tensors that a model cannot do without, by canonical name, with their shapes in values.

Derived from its family's record and the sizes of its configuration. Lets a model be refused from its headers, before
anything is loaded; what a graph does with its tensors is `models`' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.families import FAMILIES
from engine.artifacts.mixtures import BESIDE_NORMS, expert_tensors, module_of
from engine.artifacts.vision_shapes import tower_shapes
from engine.contracts.graph import LINEAR_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.artifacts.mixtures import Mixture, MixtureRecord
    from engine.contracts.graph import RecurrentGeometry

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig, stored: Container[str] = ()) -> Shapes:
    """Every tensor that a model of `config` has; an output head only when it is not tied.

    Experts are expected in the form in which `stored`, the names of the tensors that there are, has them.
    """
    family = FAMILIES[config.model_type]
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {f"{family.root}.embed_tokens.weight": table}
    for layer in range(config.layers):
        part = f"{family.root}.layers.{layer}"
        shapes |= _norms(config, family, part)
        if config.recurrent is not None and config.layer_types[layer] == LINEAR_ATTENTION:
            shapes |= _recurrent(config, config.recurrent, f"{part}.linear_attn")
        else:
            shapes |= _attention(config, family, f"{part}.self_attn", layer)
        record = family.mixture
        is_mixed = config.has_experts(layer)
        if config.mixture is not None and record is not None and is_mixed:
            shapes |= _experts(config, config.mixture, record, part, stored)
            shapes |= _beside_experts(config, config.mixture, family, part) if record.beside else {}
        if not is_mixed or (record is not None and record.beside):
            shapes |= _feed_forward(config, family, f"{part}.mlp", layer)
        if family.varied:
            shapes[f"{part}.layer_scalar"] = (1,)
        if config.denoising is not None:
            shapes[encoder_scalar(layer)] = (1,)
    if config.variety is not None and config.variety.input_width:
        shapes |= _layer_inputs(config, family, config.variety.input_width, config.variety.input_vocab_size)
    if config.denoising is not None:
        shapes |= _self_conditioning(config, family, f"{family.root}.self_conditioning")
    shapes |= {} if config.vision is None else tower_shapes(config.vision, config.hidden_size)
    shapes |= _norm(family, f"{family.root}.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


def encoder_scalar(layer: int) -> str:
    """The name of the factor on a layer's result while a denoising model reads; all else serves both passes."""
    return f"model.encoder.language_model.layers.{layer}.layer_scalar"


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that files of such a model may hold although no graph reads them.

    Layers that attend to another's keys come with projections of their own; and files of models that were trained with
    clipped activations keep their bounds.
    """
    if config.variety is None:
        return ()
    borrowing = [layer for layer in range(config.layers) if config.donor(layer) != layer]
    attention = [rf"model\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm)\.\w+" for layer in borrowing]
    return (*attention, r".*\.(input|output)_(min|max)")


def _norms(config: ModelConfig, family: Family, layer: str) -> Shapes:
    norms = family.norms
    names = (norms.before_mixer, norms.after_mixer, norms.before_feed_forward, norms.after_feed_forward)
    shapes: Shapes = {}
    for name in filter(None, names):
        shapes |= _norm(family, f"{layer}.{name}", config.hidden_size)
    return shapes


def _norm(family: Family, module: str, size: int) -> Shapes:
    gain: Shapes = {f"{module}.weight": (size,)}
    return gain | {f"{module}.bias": (size,)} if family.norm == "layer" else gain


def _attention(config: ModelConfig, family: Family, module: str, layer: int) -> Shapes:
    head_dim = config.head_dim_of(layer)
    query, shared = config.heads * head_dim, config.kv_heads_of(layer) * head_dim
    rows = {
        "q_proj": query * (2 if family.gates_attention else 1),
        "k_proj": shared,
        "v_proj": shared,
        "qkv_proj": query + 2 * shared,
    }
    borrows = config.donor(layer) != layer
    missing = ("k_proj", "v_proj") if borrows else ("v_proj",) if config.keys_are_values(layer) else ()
    shapes: Shapes = {}
    for name in family.query_key_value:
        if name not in missing:
            shapes |= _product(f"{module}.{name}", rows[name], config.hidden_size, config.attention_bias)
    shapes |= _product(f"{module}.o_proj", config.hidden_size, query, config.output_bias)
    if family.head_norms != "none":
        each = family.head_norms == "each"
        shapes[f"{module}.q_norm.weight"] = (head_dim if each else query,)
        if not borrows:
            shapes[f"{module}.k_norm.weight"] = (head_dim if each else shared,)
    return shapes


def _layer_inputs(config: ModelConfig, family: Family, width: int, vocab_size: int) -> Shapes:
    """What every layer gets of a token besides: a table, a projection, and in each layer a gate and a way back."""
    hidden, layers = config.hidden_size, range(config.layers)
    shapes: Shapes = {
        "model.embed_tokens_per_layer.weight": (vocab_size, config.layers * width),
        "model.per_layer_model_projection.weight": (config.layers * width, hidden),
    }
    shapes |= _norm(family, "model.per_layer_projection_norm", width)
    for module in (f"model.layers.{layer}" for layer in layers):
        shapes |= {
            f"{module}.per_layer_input_gate.weight": (width, hidden),
            f"{module}.per_layer_projection.weight": (hidden, width),
        }
        shapes |= _norm(family, f"{module}.post_per_layer_input_norm", hidden)
    return shapes


def _self_conditioning(config: ModelConfig, family: Family, module: str) -> Shapes:
    """What a denoising step makes of the one before it."""
    return _norm(family, f"{module}.pre_norm", config.hidden_size) | {
        f"{module}.gate_proj.weight": (config.intermediate_size, config.hidden_size),
        f"{module}.up_proj.weight": (config.intermediate_size, config.hidden_size),
        f"{module}.down_proj.weight": (config.hidden_size, config.intermediate_size),
    }


def _recurrent(config: ModelConfig, sizes: RecurrentGeometry, module: str) -> Shapes:
    hidden, values = config.hidden_size, sizes.value_heads * sizes.value_dim
    kernel = (1, sizes.convolution_tokens) if config.gains_less_one else (sizes.convolution_tokens, 1)
    return {
        f"{module}.in_proj_qkv.weight": (sizes.channels, hidden),
        f"{module}.in_proj_z.weight": (values, hidden),
        f"{module}.in_proj_b.weight": (sizes.value_heads, hidden),
        f"{module}.in_proj_a.weight": (sizes.value_heads, hidden),
        f"{module}.conv1d.weight": (sizes.channels, *kernel),
        f"{module}.A_log": (sizes.value_heads,),
        f"{module}.dt_bias": (sizes.value_heads,),
        f"{module}.norm.weight": (sizes.value_dim,),
        f"{module}.out_proj.weight": (hidden, values),
    }


def _feed_forward(config: ModelConfig, family: Family, module: str, layer: int) -> Shapes:
    inner = config.intermediate_size_of(layer)
    rows = inner * (2 if family.gated else 1) // len(family.feed_forward)
    shapes: Shapes = {}
    for name in family.feed_forward:
        shapes |= _product(f"{module}.{name}", rows, config.hidden_size, config.mlp_bias)
    return shapes | _product(f"{module}.{family.down}", config.hidden_size, inner, config.mlp_bias)


def _experts(
    config: ModelConfig, mixture: Mixture, record: MixtureRecord, layer: str, stored: Container[str]
) -> Shapes:
    """A router, and the matrices of the experts: one by one, stacked, or with gate and up in one."""
    module = module_of(record, layer)
    names = expert_tensors(record, module, mixture.experts, stored)
    leading = () if names.form == "single" else (mixture.experts,)
    rows = 2 * mixture.inner if names.form == "fused" else mixture.inner
    shapes: Shapes = {f"{module}.{record.router}.weight": (mixture.experts, config.hidden_size)}
    for name in (name for stack in names.gate_up for name in stack):
        shapes[name] = (*leading, rows, config.hidden_size)
    shapes |= dict.fromkeys(names.down, (*leading, config.hidden_size, mixture.inner))
    return shapes | (_shared_expert(config, mixture, f"{module}.{record.shared}") if record.shared else {})


def _beside_experts(config: ModelConfig, mixture: Mixture, family: Family, layer: str) -> Shapes:
    """What joins experts and a dense feed-forward: scales of the router, and norms around each of the two."""
    shapes: Shapes = {
        f"{layer}.router.scale": (config.hidden_size,),
        f"{layer}.router.per_expert_scale": (mixture.experts,),
    }
    for name in BESIDE_NORMS:
        shapes |= _norm(family, f"{layer}.{name}", config.hidden_size)
    return shapes


def _shared_expert(config: ModelConfig, mixture: Mixture, module: str) -> Shapes:
    hidden, inner = config.hidden_size, mixture.shared_inner
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
        f"{module}_gate.weight": (1, hidden),
    }


def _product(module: str, rows: int, columns: int, biased: bool) -> Shapes:
    weight: Shapes = {f"{module}.weight": (rows, columns)}
    return weight | {f"{module}.bias": (rows,)} if biased else weight
