"""A Hugging Face model folder's `config.json` and its neighbours, as a `ModelConfig`.

A nested `text_config` wins over the top level. Defaults of absent fields: KV heads = heads, head_dim = hidden / heads,
rms_norm_eps 1e-6, no biases, all layers full attention (but see `_implied_layer_types`). An absent
`tie_word_embeddings` is answered by the weights: tied exactly if they hold no output head.
Source: reference, §4.3 and §4.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.artifacts.config import FULL_ATTENTION, MOST_LAYERS, SLIDING_ATTENTION, ModelConfig, union_of_ids
from engine.artifacts.fields import Fields, read_object
from engine.artifacts.generation_files import (
    TOKENIZER_CONFIG_FILE,
    log_unapplied,
    option_defaults,
    tokenizer_eos_ids,
)
from engine.artifacts.model_files import is_named
from engine.artifacts.quantization import parse_quantization
from engine.artifacts.rope_fields import parse_rope
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"

# Names in files, and the family whose graph reads them.
_FAMILIES: Final[Mapping[str, str]] = {"llama": "llama", "mistral": "llama", "iquestcoder": "llama"}
# Model types whose `sliding_window` holds for every layer when no `layer_types` are stated.
_SLIDING_THROUGHOUT: Final = frozenset({"mistral"})
_ACTIVATIONS: Final = ("silu", "swish")


def read_config(folder: Path, document: Mapping[str, object], *, head_is_stored: bool) -> ModelConfig:
    """Interpret the parsed `config.json` of `folder` with its neighbours; `head_is_stored`: the weights hold `lm_head`.

    Raises:
        ArtifactError: a file is missing, damaged, or of a kind that we do not read.
    """
    generation: dict[str, object] = {}
    if is_named(folder / GENERATION_CONFIG_FILE):
        generation = read_object(folder / GENERATION_CONFIG_FILE)
        log_unapplied(Fields(GENERATION_CONFIG_FILE, generation))
    return model_config(
        document, generation=generation, extra_eos_ids=tokenizer_eos_ids(folder), head_is_stored=head_is_stored
    )


def model_config(
    document: Mapping[str, object],
    *,
    generation: Mapping[str, object] | None = None,
    extra_eos_ids: tuple[int, ...] = (),
    head_is_stored: bool = False,
) -> ModelConfig:
    """Interpret parsed `config.json` and `generation_config.json` documents; pure."""
    top = Fields(CONFIG_FILE, document)
    fields = _text_fields(top)
    defaults = Fields(GENERATION_CONFIG_FILE, generation or {})
    family = _family(fields)
    _check_activation(fields)
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    heads, kv_heads, head_dim = _heads(fields)
    context_length = fields.count("max_position_embeddings")
    layer_types, sliding_window = _layer_types(fields, layers, context_length)
    stated_ids = union_of_ids(top.token_ids("eos_token_id"), fields.token_ids("eos_token_id"))
    generation_ids = defaults.token_ids("eos_token_id")
    config = ModelConfig(
        model_type=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, head_dim=head_dim, context_length=context_length),
        layer_types=layer_types,
        sliding_window=sliding_window,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=not head_is_stored),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        eos_token_ids=union_of_ids(stated_ids, generation_ids, extra_eos_ids),
        bos_token_id=_first(fields.token_ids("bos_token_id")),
        quantization=parse_quantization(fields),
        option_defaults=option_defaults(defaults),
        stored_dtype=fields.text("dtype") or fields.text("torch_dtype"),
    )
    for file, ids in (
        (CONFIG_FILE, (*stated_ids, *fields.token_ids("bos_token_id"))),
        (GENERATION_CONFIG_FILE, generation_ids),
        (TOKENIZER_CONFIG_FILE, extra_eos_ids),
    ):
        check_token_ids(file, ids, config.vocab_size)
    return config


def check_token_ids(file: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `CorruptArtifactError` naming `file` when a special id that it states lies outside the vocabulary."""
    for token in ids:
        if token >= vocab_size:
            raise CorruptArtifactError(file, f"special token id {token} lies outside the vocabulary of {vocab_size}")


def _text_fields(top: Fields) -> Fields:
    """The top level with everything that `text_config` states laid over it."""
    nested = top.fields("text_config")
    return top if nested is None else top.overlaid(nested)


def _family(fields: Fields) -> str:
    name = fields.text("model_type")
    if not name:
        raise MissingArtifactError(CONFIG_FILE, "has no model_type")
    if name not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnsupportedArtifactError(CONFIG_FILE, f"model_type {name!r} is not supported; supported: {known}")
    return _FAMILIES[name]


def _check_activation(fields: Fields) -> None:
    name = fields.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedArtifactError(
            CONFIG_FILE, f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key/value heads and the size of one head."""
    hidden_size, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CorruptArtifactError(CONFIG_FILE, f"{heads} attention heads cannot share {kv_heads} key/value heads")
    if "head_dim" not in fields and hidden_size % heads:
        raise CorruptArtifactError(CONFIG_FILE, f"hidden_size {hidden_size} is not a multiple of {heads} heads")
    return heads, kv_heads, fields.count("head_dim", hidden_size // heads)


def _layer_types(fields: Fields, layers: int, context_length: int) -> tuple[tuple[str, ...], int]:
    """The attention type of every layer, and the window in tokens (0 when no layer slides)."""
    stated = fields.texts("layer_types") or _implied_layer_types(fields, layers, context_length)
    if len(stated) != layers:
        raise CorruptArtifactError(CONFIG_FILE, f"layer_types names {len(stated)} layers, the model has {layers}")
    for kind in stated:
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise UnsupportedArtifactError(CONFIG_FILE, f"layer type {kind!r} is not supported")
    return stated, fields.count("sliding_window") if SLIDING_ATTENTION in stated else 0


def _implied_layer_types(fields: Fields, layers: int, context_length: int) -> tuple[str, ...]:
    """All layers slide where the model type says so, else none does.

    Mistral's `sliding_window` holds for all layers in the model's own definition, and its weights were trained so:
    we follow it, although mlx-lm drops the window. A llama's window means nothing without `layer_types`, in both. A
    window that the context cannot outgrow is full attention, which is cheaper to hold.
    """
    slides = (
        fields.text("model_type") in _SLIDING_THROUGHOUT
        and "sliding_window" in fields
        and fields.count("sliding_window") < context_length
    )
    return (SLIDING_ATTENTION if slides else FULL_ATTENTION,) * layers


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
