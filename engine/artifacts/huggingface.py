"""A Hugging Face model folder's `config.json` and its neighbours, as a `ModelConfig`.

A nested `text_config` wins over the top level. Defaults of absent fields: KV heads = heads, head_dim = hidden / heads,
rms_norm_eps 1e-6, no biases, all layers full attention; a family's record may say otherwise. An absent
`tie_word_embeddings` is answered by the weights: tied exactly if they hold no output head.
Source: reference, §4.3 and §4.6.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.artifacts.canonical_names import canonical_name
from engine.artifacts.config import FULL_ATTENTION, MOST_LAYERS, ModelConfig, union_of_ids
from engine.artifacts.denoising_fields import parse_denoising
from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.fields import Fields, read_object
from engine.artifacts.generation_files import (
    TOKENIZER_CONFIG_FILE,
    log_unapplied,
    option_defaults,
    tokenizer_eos_ids,
)
from engine.artifacts.layer_fields import layer_ropes, layer_types
from engine.artifacts.layer_variety import parse_variety
from engine.artifacts.mixtures import parse_mixture
from engine.artifacts.model_files import is_named
from engine.artifacts.quantization import parse_quantization
from engine.artifacts.recurrent_fields import parse_recurrent
from engine.artifacts.scaling_fields import parse_scaling
from engine.artifacts.served_fields import check_served
from engine.artifacts.vision_fields import VISION_CONFIG, parse_vision
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from engine.artifacts.family import Family
    from engine.artifacts.mixtures import Mixture
    from engine.artifacts.quantization import QuantizationConfig
    from engine.artifacts.tensor_header import TensorHeader

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"
_NESTED: Final = "text_config"


def read_config(
    folder: Path,
    document: Mapping[str, object],
    *,
    head_is_stored: bool,
    is_original: bool = False,
    sees: bool = False,
) -> ModelConfig:
    """Interpret the parsed `config.json` of `folder` with its neighbours.

    `head_is_stored`: the weights hold `lm_head`; `is_original` and `sees` as in `model_config`.

    Raises:
        ArtifactError: a file is missing, damaged, or of a kind that we do not read.
    """
    return model_config(
        document,
        generation=read_generation(folder),
        extra_eos_ids=tokenizer_eos_ids(folder),
        head_is_stored=head_is_stored,
        is_original=is_original,
        sees=sees,
    )


def read_generation(folder: Path) -> dict[str, object]:
    """The parsed `generation_config.json`, empty when there is none; logs which of its fields we do not apply."""
    if not is_named(folder / GENERATION_CONFIG_FILE):
        return {}
    generation = read_object(folder / GENERATION_CONFIG_FILE)
    log_unapplied(Fields(GENERATION_CONFIG_FILE, generation))
    return generation


def model_config(
    document: Mapping[str, object],
    *,
    generation: Mapping[str, object] | None = None,
    extra_eos_ids: tuple[int, ...] = (),
    head_is_stored: bool = False,
    is_original: bool = False,
    sees: bool = False,
) -> ModelConfig:
    """Interpret parsed `config.json` and `generation_config.json` documents; pure.

    `is_original`: the weights are as their authors store them, where MLX stores them otherwise. `sees`: what
    `sees_images` says of the model.
    """
    top = Fields(CONFIG_FILE, document)
    stated = text_fields(top)
    defaults = Fields(GENERATION_CONFIG_FILE, generation or {})
    family = _family(stated)
    fields = Fields(CONFIG_FILE, family.defaults).overlaid(stated)
    _check_activation(fields, family)
    check_served(top, fields, family)
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    heads, kv_heads, head_dim = _heads(fields)
    context_length = fields.count("max_position_embeddings")
    kinds, held_kinds, sliding_window = layer_types(fields, family, layers=layers, context_length=context_length)
    variety = (
        parse_variety(fields, held_kinds, heads=heads, kv_heads=kv_heads, head_dim=head_dim) if family.varied else None
    )
    head_dims = {FULL_ATTENTION: variety.full_head_dim} if variety else {}
    ropes = layer_ropes(
        fields,
        kinds,
        head_dims={kind: head_dims.get(kind, head_dim) for kind in kinds},
        context_length=context_length,
    )
    mixture = None if family.mixture is None else parse_mixture(fields, family.mixture, layers=layers)
    stated_ids = union_of_ids(top.token_ids("eos_token_id"), fields.token_ids("eos_token_id"))
    generation_ids = defaults.token_ids("eos_token_id")
    config = ModelConfig(
        model_type=family.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size", _implied_inner(mixture, layers)),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.positive(family.norm_eps, 1e-6),
        layer_types=held_kinds,
        sliding_window=sliding_window,
        layer_ropes=ropes,
        scaling=parse_scaling(fields, stated, family),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=not head_is_stored),
        attention_bias=_has_bias(fields, family.attention_bias),
        output_bias=_has_bias(fields, family.output_bias),
        mlp_bias=_has_bias(fields, family.mlp_bias),
        eos_token_ids=union_of_ids(stated_ids, generation_ids, extra_eos_ids),
        bos_token_id=_first(fields.token_ids("bos_token_id")),
        quantization=_quantization(fields, family, sees=sees),
        option_defaults=option_defaults(defaults),
        stored_dtype=fields.text("dtype") or fields.text("torch_dtype"),
        mixture=mixture,
        recurrent=parse_recurrent(fields, kinds),
        variety=variety,
        denoising=parse_denoising(top, fields, mixture) if family.method == "denoising" else None,
        vision=parse_vision(top, fields) if sees else None,
        gains_less_one=family.norm == "rms_plus_one" or (family.norm == "rms_as_stored" and is_original),
    )
    for file, ids in (
        (CONFIG_FILE, (*stated_ids, *fields.token_ids("bos_token_id"))),
        (GENERATION_CONFIG_FILE, generation_ids),
        (TOKENIZER_CONFIG_FILE, extra_eos_ids),
    ):
        check_token_ids(file, ids, config.vocab_size)
    return config


def sees_images(document: Mapping[str, object], stored: Iterable[str]) -> bool:
    """Whether a model has a vision tower that its family serves: described, and among the names `stored`."""
    top = Fields(CONFIG_FILE, document)
    tower = _family(text_fields(top)).tower
    return VISION_CONFIG in top and any(name.startswith(tower) for name in stored)


def canonical_tensors(
    document: Mapping[str, object], tensors: Mapping[str, TensorHeader], *, sees: bool
) -> dict[str, TensorHeader]:
    """The tensors of a folder under their canonical names, without those of parts that its family does not serve.

    Raises:
        CorruptArtifactError: two tensors have one name.
    """
    top = Fields(CONFIG_FILE, document)
    family, nested = _family(text_fields(top)), _NESTED in top
    found: dict[str, TensorHeader] = {}
    for stored, header in tensors.items():
        name = canonical_name(family, stored, nested=nested, sees=sees)
        if name is None:
            continue
        if name in found:
            raise CorruptArtifactError(header.file.name, f"holds {name} twice: as {found[name].name} and as {stored}")
        found[name] = header
    return found


def _quantization(fields: Fields, family: Family, *, sees: bool) -> QuantizationConfig | None:
    """How the weights are quantized, by canonical name."""
    stated = parse_quantization(fields)
    if stated is None:
        return None
    overrides = {
        name: scheme
        for stored, scheme in stated.overrides.items()
        if (name := canonical_name(family, stored, nested=_NESTED in fields, sees=sees)) is not None
    }
    return replace(stated, overrides=overrides)


def check_token_ids(file: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `CorruptArtifactError` naming `file` when a special id that it states lies outside the vocabulary."""
    for token in ids:
        if token >= vocab_size:
            raise CorruptArtifactError(file, f"special token id {token} lies outside the vocabulary of {vocab_size}")


def text_fields(top: Fields) -> Fields:
    """The top level with everything that `text_config` states laid over it."""
    nested = top.fields(_NESTED)
    return top if nested is None else top.overlaid(nested)


def _family(fields: Fields) -> Family:
    name = fields.text("model_type")
    if not name:
        raise MissingArtifactError(CONFIG_FILE, "has no model_type")
    known = {**FAMILIES, **ALIASES}
    if name not in known:
        raise UnsupportedArtifactError(
            CONFIG_FILE, f"model_type {name!r} is not supported; supported: {', '.join(known)}"
        )
    return known[name]


def _check_activation(fields: Fields, family: Family) -> None:
    field = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    name = fields.text(field, family.activation_names[0])
    if name not in family.activation_names:
        raise UnsupportedArtifactError(
            CONFIG_FILE, f"{field} {name!r} is not supported; supported: {', '.join(family.activation_names)}"
        )


def _has_bias(fields: Fields, rule: str | bool) -> bool:
    return fields.flag(rule, default=False) if isinstance(rule, str) else rule


def _implied_inner(mixture: Mixture | None, layers: int) -> int | None:
    """The inner size of dense feed-forwards where no layer has one, so that none need be stated."""
    return mixture.inner if mixture is not None and len(mixture.layers) == layers else None


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key/value heads and the size of one head."""
    hidden_size, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CorruptArtifactError(CONFIG_FILE, f"{heads} attention heads cannot share {kv_heads} key/value heads")
    if "head_dim" not in fields and hidden_size % heads:
        raise CorruptArtifactError(CONFIG_FILE, f"hidden_size {hidden_size} is not a multiple of {heads} heads")
    return heads, kv_heads, fields.count("head_dim", hidden_size // heads)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
