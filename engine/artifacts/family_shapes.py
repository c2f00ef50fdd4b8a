"""The tensors that a model cannot do without, by canonical name, with their shapes in values.

Derived from its family's record and the sizes of its configuration. Lets a model be refused from its headers, before
anything is loaded; what a graph does with its tensors is `models`' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.families import FAMILIES
from engine.artifacts.mixtures import expert_tensors
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
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config.layers):
        part = f"model.layers.{layer}"
        shapes |= _norms(config, family, part)
        if config.recurrent is not None and config.layer_types[layer] == LINEAR_ATTENTION:
            shapes |= _recurrent(config, config.recurrent, f"{part}.linear_attn")
        else:
            shapes |= _attention(config, family, f"{part}.self_attn")
        if config.mixture is not None and family.mixture is not None and layer in config.mixture.layers:
            shapes |= _experts(config, config.mixture, family.mixture, part, stored)
        else:
            shapes |= _feed_forward(config, family, f"{part}.mlp")
    shapes |= _norm(family, "model.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


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


def _attention(config: ModelConfig, family: Family, module: str) -> Shapes:
    query, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {
        "q_proj": query * (2 if family.gates_attention else 1),
        "k_proj": shared,
        "v_proj": shared,
        "qkv_proj": query + 2 * shared,
    }
    shapes: Shapes = {}
    for name in family.query_key_value:
        shapes |= _product(f"{module}.{name}", rows[name], config.hidden_size, config.attention_bias)
    shapes |= _product(f"{module}.o_proj", config.hidden_size, query, config.output_bias)
    if family.head_norms != "none":
        each = family.head_norms == "each"
        shapes |= {
            f"{module}.q_norm.weight": (config.head_dim if each else query,),
            f"{module}.k_norm.weight": (config.head_dim if each else shared,),
        }
    return shapes


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


def _feed_forward(config: ModelConfig, family: Family, module: str) -> Shapes:
    inner = config.intermediate_size
    rows = inner * (2 if family.gated else 1) // len(family.feed_forward)
    shapes: Shapes = {}
    for name in family.feed_forward:
        shapes |= _product(f"{module}.{name}", rows, config.hidden_size, config.mlp_bias)
    return shapes | _product(f"{module}.{family.down}", config.hidden_size, inner, config.mlp_bias)


def _experts(
    config: ModelConfig, mixture: Mixture, record: MixtureRecord, layer: str, stored: Container[str]
) -> Shapes:
    """A router, and the matrices of the experts: one by one, stacked, or with gate and up in one."""
    module = f"{layer}.{record.module}"
    names = expert_tensors(record, module, mixture.experts, stored)
    leading = () if names.form == "single" else (mixture.experts,)
    rows = 2 * mixture.inner if names.form == "fused" else mixture.inner
    shapes: Shapes = {f"{module}.{record.router}.weight": (mixture.experts, config.hidden_size)}
    for name in (name for stack in names.gate_up for name in stack):
        shapes[name] = (*leading, rows, config.hidden_size)
    shapes |= dict.fromkeys(names.down, (*leading, config.hidden_size, mixture.inner))
    return shapes | (_shared_expert(config, mixture, f"{module}.{record.shared}") if record.shared else {})


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
