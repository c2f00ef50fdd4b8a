"""A GGUF file's metadata in the terms of Hugging Face: one `ModelConfig`, and tensors under canonical names.

What a family leaves to rules is read by the same code as for a folder. Source: the GGUF specification (standard keys).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.artifacts.config import FULL_ATTENTION, MOST_LAYERS, SLIDING_ATTENTION, ModelConfig, union_of_ids
from engine.artifacts.fields import Fields
from engine.artifacts.gguf_architectures import ARCHITECTURES, EMBEDDING, HEAD, canonical_name
from engine.artifacts.gguf_rope import FACTOR_TENSORS, rotations
from engine.artifacts.huggingface import check_token_ids
from engine.artifacts.layer_fields import layer_types, rotates
from engine.artifacts.scaling_fields import parse_scaling
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.artifacts.family import Norm
    from engine.artifacts.gguf import GgufHeader
    from engine.artifacts.gguf_architectures import Architecture
    from engine.artifacts.tensor_header import TensorHeader

_END_TOKEN_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_NORM_EPS: Final[Mapping[Norm, str]] = {
    "rms": "layer_norm_rms_epsilon",
    "rms_plus_one": "layer_norm_rms_epsilon",  # converters add the one
    "rms_as_stored": "layer_norm_rms_epsilon",
    "layer": "layer_norm_epsilon",
}
# What a file may state of its family's own facts, and the field of a `config.json` that states the same.
_FACTS: Final[Mapping[str, str]] = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def model_config(path: Path, header: GgufHeader) -> ModelConfig:
    """Interpret the metadata of the GGUF file at `path`.

    Raises:
        UnsupportedArtifactError: an architecture, or a use of it, that we do not read.
        MissingArtifactError, CorruptArtifactError: a key or tensor is absent, or contradicts another.
    """
    fields = Fields(path.name, header.metadata)
    name, architecture = _architecture(fields)
    _refuse_variants(fields, name)
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise MissingArtifactError(path.name, f"has no tensor {EMBEDDING!r}")
    layers = fields.count(f"{name}.block_count", most=MOST_LAYERS)
    hidden_size = fields.count(f"{name}.embedding_length")
    heads, kv_heads, head_dim = _heads(fields, name, hidden_size)
    context_length = fields.count(f"{name}.context_length")
    facts = _facts(fields, name, architecture, layers=layers, hidden_size=hidden_size, heads=heads, head_dim=head_dim)
    known = Fields(path.name, architecture.family.defaults).overlaid(facts)
    kinds, held_kinds, window = layer_types(known, architecture.family, layers=layers, context_length=context_length)
    full, sliding = rotations(fields, name, header, head_dim=head_dim, context_length=context_length)
    ropes = {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}
    config = ModelConfig(
        model_type=architecture.family.name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, f"{name}.feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.positive(f"{name}.attention.{_NORM_EPS[architecture.family.norm]}"),
        layer_types=held_kinds,
        layer_ropes=tuple(ropes[kind] if rotates(known, layer) else None for layer, kind in enumerate(kinds)),
        sliding_window=window,
        scaling=parse_scaling(known, facts, architecture.family),
        tie_word_embeddings=HEAD not in header.tensors,
        attention_bias=_has_bias(header, "attn_q", "attn_k", "attn_v", "attn_qkv"),
        output_bias=_has_bias(header, "attn_output"),
        mlp_bias=_has_bias(header, "ffn_gate", "ffn_up", "ffn_down"),
        eos_token_ids=union_of_ids(*(fields.token_ids(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS)),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
    )
    special_ids = (*config.eos_token_ids, *fields.token_ids("tokenizer.ggml.bos_token_id"))
    check_token_ids(path.name, special_ids, config.vocab_size)
    return config


def canonical_tensors(header: GgufHeader) -> dict[str, TensorHeader]:
    """The tensors under their Hugging Face names; unknown ones keep their own, for the audit to report.

    Rotary factors are left out: they are part of the configuration.
    """
    family = ARCHITECTURES[str(header.metadata["general.architecture"])].family
    return {
        (canonical := canonical_name(family, name)): replace(tensor, name=canonical)
        for name, tensor in header.tensors.items()
        if name not in FACTOR_TENSORS
    }


def _facts(
    fields: Fields, name: str, architecture: Architecture, *, layers: int, hidden_size: int, heads: int, head_dim: int
) -> Fields:
    """What a `config.json` would state of the family's own facts."""
    facts: dict[str, object] = {"num_hidden_layers": layers, "hidden_size": hidden_size}
    for key, field in _FACTS.items():
        if f"{name}.{key}" in fields:
            facts[field] = fields.positive(f"{name}.{key}")
    if "sliding_window" in facts:
        facts["sliding_window"] = fields.count(f"{name}.attention.sliding_window")
    if architecture.layers_of_widest:
        widest = layers == architecture.layers_of_widest
        facts["query_pre_attn_scalar"] = hidden_size // heads if widest else head_dim
    return Fields(fields.file, facts)


def _architecture(fields: Fields) -> tuple[str, Architecture]:
    name = fields.text("general.architecture")
    if not name:
        raise MissingArtifactError(fields.file, "has no general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedArtifactError(fields.file, f"architecture {name!r} is not supported; supported: {known}")
    return name, ARCHITECTURES[name]


def _refuse_variants(fields: Fields, name: str) -> None:
    if fields.number("split.count", 1) > 1:
        raise UnsupportedArtifactError(fields.file, "is one part of a split model; join the parts first")
    if fields.number(f"{name}.expert_count", 0) > 0:
        raise UnsupportedArtifactError(fields.file, f"architecture {name!r} with experts is not supported")


def _has_bias(header: GgufHeader, *projections: str) -> bool:
    return any(f"blk.0.{projection}.bias" in header.tensors for projection in projections)


def _heads(fields: Fields, name: str, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and the size of one head."""
    heads = _uniform(fields, f"{name}.attention.head_count")
    key = f"{name}.attention.head_count_kv"
    kv_heads = _uniform(fields, key) if key in fields else heads
    stated = f"{name}.attention.key_length"
    if heads % kv_heads or (stated not in fields and hidden_size % heads):
        raise CorruptArtifactError(
            fields.file, f"{heads} heads over {kv_heads} key/value heads do not divide {hidden_size} values"
        )
    head_dim = fields.count(stated, max(1, hidden_size // heads))
    if fields.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedArtifactError(fields.file, "keys and values of different sizes are not supported")
    return heads, kv_heads, head_dim


def _uniform(fields: Fields, key: str) -> int:
    """A count that may be written once per layer, as long as all layers agree."""
    value = fields.raw(key)
    if not isinstance(value, tuple):
        return fields.count(key)
    if len(set(value)) != 1:
        raise UnsupportedArtifactError(fields.file, f"{key} that differs between layers is not supported")
    return Fields(fields.file, {key: value[0]}).count(key)
