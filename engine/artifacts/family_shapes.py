"""The tensors that a family cannot do without, by canonical name, with their shapes in values.

Lets a model be refused from its headers, before anything is loaded. What a graph does with them is `models`' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor that a model of `config` has; an output head only when it is not tied."""
    return _FAMILIES[config.model_type](config)


def _llama(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _llama_layer(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


def _llama_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"q": (query, hidden), "k": (shared, hidden), "v": (shared, hidden), "o": (hidden, query)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for block, projections, biased in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        for name, shape in projections.items():
            shapes[f"{block}.{name}_proj.weight"] = shape
            if biased:
                shapes[f"{block}.{name}_proj.bias"] = shape[:1]
    return shapes


_FAMILIES = {"llama": _llama}
