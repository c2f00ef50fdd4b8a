"""A GGUF file's metadata and tensor names in the terms of Hugging Face: one `ModelConfig`, canonical names.

Architectures are a table. The "llama" converter permutes the rows of the query and key projections, so rotation pairs
neighbours ("traditional") and the weights stay as they are stored. Source: the GGUF specification (standard keys).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engine.artifacts.config import FULL_ATTENTION, MOST_LAYERS, ModelConfig, union_of_ids
from engine.artifacts.fields import Fields
from engine.artifacts.huggingface import check_token_ids
from engine.artifacts.model_files import open_file
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.rope import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.artifacts.gguf import GgufHeader
    from engine.artifacts.tensor_header import TensorHeader

EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
ROPE_FACTORS: Final = "rope_freqs.weight"
_END_TOKEN_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """How one `general.architecture` maps to a graph: its family, its rotation, and its names."""

    model_type: str
    traditional: bool
    whole: Mapping[str, str]
    per_layer: Mapping[str, str]


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture(
        model_type="llama",
        traditional=True,
        whole={
            EMBEDDING: "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            HEAD: "lm_head.weight",
        },
        per_layer={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
        },
    ),
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
    layers, hidden_size = (
        fields.count(f"{name}.block_count", most=MOST_LAYERS),
        fields.count(f"{name}.embedding_length"),
    )
    heads, kv_heads, head_dim = _heads(fields, name, hidden_size)
    context_length = fields.count(f"{name}.context_length")
    config = ModelConfig(
        model_type=architecture.model_type,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, f"{name}.feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.positive(f"{name}.attention.layer_norm_rms_epsilon"),
        layer_types=(FULL_ATTENTION,) * layers,
        layer_ropes=(_rope(fields, name, header, head_dim, context_length),) * layers,
        tie_word_embeddings=HEAD not in header.tensors,
        attention_bias=_has_bias(header, "attn_q", "attn_k", "attn_v"),
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
    architecture = _ARCHITECTURES[str(header.metadata["general.architecture"])]
    return {
        (canonical := _canonical_name(architecture, name)): replace(tensor, name=canonical)
        for name, tensor in header.tensors.items()
        if name != ROPE_FACTORS
    }


def _canonical_name(architecture: _Architecture, name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in architecture.per_layer:
        return f"model.layers.{match[1]}.{architecture.per_layer[match[2]]}.{match[3]}"
    return architecture.whole.get(name, name)


def _architecture(fields: Fields) -> tuple[str, _Architecture]:
    name = fields.text("general.architecture")
    if not name:
        raise MissingArtifactError(fields.file, "has no general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedArtifactError(fields.file, f"architecture {name!r} is not supported; supported: {known}")
    return name, _ARCHITECTURES[name]


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
    if heads % kv_heads or hidden_size % heads:
        raise CorruptArtifactError(
            fields.file, f"{heads} heads over {kv_heads} key/value heads do not divide {hidden_size} values"
        )
    head_dim = fields.count(f"{name}.attention.key_length", hidden_size // heads)
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


def _rope(fields: Fields, name: str, header: GgufHeader, head_dim: int, context_length: int) -> RopeConfig:
    scaling = f"{name}.rope.scaling."
    rope = RopeConfig(
        dims=fields.count(f"{name}.rope.dimension_count", head_dim),
        context_length=context_length,
        theta=fields.positive(f"{name}.rope.freq_base", 10000.0),
        traditional=_ARCHITECTURES[name].traditional,
        original_context_length=fields.count(f"{scaling}original_context_length", context_length),
    )
    if rope.dims > head_dim or rope.dims % 2:
        raise CorruptArtifactError(fields.file, f"rotates {rope.dims} of {head_dim} components of a head")
    kind, factor_key = _scaling(fields, name)
    if ROPE_FACTORS in header.tensors:
        return _with_factors(header.tensors[ROPE_FACTORS], rope, kind)
    if kind == "none":
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=fields.positive(factor_key))
    if kind == "yarn":
        return replace(
            rope,
            kind="yarn",
            factor=fields.positive(factor_key),
            beta_fast=fields.positive(f"{scaling}yarn_beta_fast", rope.beta_fast),
            beta_slow=fields.positive(f"{scaling}yarn_beta_slow", rope.beta_slow),
        )
    raise UnsupportedArtifactError(fields.file, f"rotary embedding of kind {kind!r} is not supported")


def _scaling(fields: Fields, name: str) -> tuple[str, str]:
    """The kind of scaling, and the key of its factor.

    As llama.cpp reads it: a kind that is not stated is linear, a linear factor of 0 or 1 (or none) scales nothing,
    and old files call the factor `rope.scale_linear`.
    """
    for neutral in ("attn_factor", "yarn_attn_factor"):
        if fields.number(key := f"{name}.rope.scaling.{neutral}", 1.0) != 1.0:
            raise UnsupportedArtifactError(fields.file, f"{key} {fields.raw(key)!r} is not supported")
    newer, older = f"{name}.rope.scaling.factor", f"{name}.rope.scale_linear"
    factor_key = newer if newer in fields or older not in fields else older
    if fields.number(factor_key, 0.0) < 0:
        raise fields.bad(factor_key, "must be at least 0")
    kind = fields.text(f"{name}.rope.scaling.type", "linear")
    if kind == "linear" and fields.number(factor_key, 0.0) in (0.0, 1.0):
        kind = "none"
    return kind, factor_key


def _with_factors(tensor: TensorHeader, rope: RopeConfig, kind: str) -> RopeConfig:
    """Stored factors, one per pair, stretch the plain wavelengths: "longrope" without its scaling of the input."""
    if kind != "none" or tensor.dtype != "F32" or tensor.shape != (rope.dims // 2,):
        raise UnsupportedArtifactError(
            tensor.file.name,
            f"{ROPE_FACTORS} of {tensor.dtype} {list(tensor.shape)} with {kind!r} scaling is not supported",
        )
    with open_file(tensor.file) as file:
        file.seek(tensor.offset_bytes)
        factors = struct.unpack(f"<{rope.dims // 2}f", file.read(tensor.nbytes))
    if not all(0 < factor < float("inf") for factor in factors):
        raise CorruptArtifactError(tensor.file.name, f"{ROPE_FACTORS} holds a factor that is no positive number")
    return replace(rope, kind="longrope", long_factor=factors, short_factor=factors, attention_factor=1.0)
