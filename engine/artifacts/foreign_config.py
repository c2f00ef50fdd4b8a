"""Models that have no graph here and that mlx-lm can serve: whether it can, and what the engine must know of them.

Tells from installed files alone and imports nothing of mlx-lm, which would bring mlx along. Sizes are read under every
name that configuration files use for them; they serve the memory prediction and the text layer, not the graph.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.artifacts.config import FULL_ATTENTION, MOST_LAYERS, ModelConfig, union_of_ids
from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.fields import Fields
from engine.artifacts.generation_files import option_defaults, tokenizer_eos_ids
from engine.artifacts.huggingface import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    check_token_ids,
    read_generation,
    text_fields,
)
from engine.artifacts.quantization import parse_foreign_quantization
from engine.contracts.errors import UnsupportedArtifactError
from engine.contracts.graph import LINEAR_ATTENTION, RecurrentGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE: Final = "mlx_lm"
INSTALL: Final = ".venv/bin/python -m pip install -e '.[mlx-lm]'"
UNSTATED_CONTEXT_TOKENS: Final = 2**17
"""The context of a model whose configuration states none, as recurrent ones do not."""

_NAME: Final = re.compile(r"\w[\w-]*", re.ASCII)
_WORD: Final = re.compile(r"\w+")
_CLASSES: Final = frozenset({"Model", "ModelArgs"})
# What mlx-lm calls an architecture, where its module has another name. Source: `mlx_lm.utils.MODEL_REMAPPING`.
RENAMED: Final = frozenset(
    {
        "deepseek_v41_text",
        "falcon_mamba",
        "gemma4_unified",
        "iquestcoder",
        "joyai_llm_flash",
        "kimi_k2",
        "llava",
        "minimax_m2",
        "mistral",
        "phi-msft",
        "qwen2_5_vl",
        "xverse",
    }
)
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "model_dim", "dim")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")
_CONTEXT: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "seq_length",
)


# Names of architectures whose layers all keep a state of one size, whatever the tokens.
_MAMBA: Final = frozenset({"mamba", "falcon_mamba"})
_MAMBA2: Final = frozenset({"mamba2"})
_RWKV: Final = frozenset({"rwkv7"})
# With `kv_lora_rank`, most keep the latent and one rotated key; these keep the keys and values that it stands for.
_UNPACKS_LATENTS: Final = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
_TWO_CACHES: Final = frozenset({"longcat_flash", "longcat_flash_ngram"})


def has_own_graph(document: Mapping[str, object]) -> bool:
    """Whether a parsed `config.json` names a family of ours, or nothing that could be one of mlx-lm's."""
    name = text_fields(Fields(CONFIG_FILE, document)).text("model_type")
    return not name or name in FAMILIES or name in ALIASES


def read_foreign_config(folder: Path, document: Mapping[str, object]) -> ModelConfig:
    """What is known of the model in `folder`, for whose `config.json` we have no graph; rotations and norms are not.

    Raises:
        UnsupportedArtifactError: mlx-lm is not installed or does not know the architecture, or the model wants its own
            code to be run.
        MissingArtifactError, CorruptArtifactError: a size that the engine needs is absent or absurd.
    """
    top = Fields(CONFIG_FILE, document)
    fields = text_fields(top)
    name = top.text("model_type") or fields.text("model_type")
    _require_architecture(name)
    if "model_file" in top:
        raise UnsupportedArtifactError(CONFIG_FILE, "names code of its own to be run (model_file), which we never do")
    generation = Fields(GENERATION_CONFIG_FILE, read_generation(folder))
    layers = _count(fields, _LAYERS, most=MOST_LAYERS)
    hidden_size = _count(fields, _HIDDEN)
    kv_heads = _count(fields, _KV_HEADS, _count(fields, _HEADS, 1))
    heads = _count(fields, _HEADS, kv_heads)
    ends = (top.token_ids("eos_token_id"), fields.token_ids("eos_token_id"), generation.token_ids("eos_token_id"))
    begins = fields.token_ids("bos_token_id")
    recurrent = _recurrent(name, fields, hidden_size)
    head_dim = _count(fields, _HEAD_DIM, max(1, hidden_size // heads))
    if "kv_lora_rank" in fields:
        kv_heads, head_dim = _latent(name, fields, heads)
    vocab_size = fields.count("vocab_size")
    check_token_ids(CONFIG_FILE, (*union_of_ids(*ends), *begins), vocab_size)
    return ModelConfig(
        model_type=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_count(fields, _CONTEXT, UNSTATED_CONTEXT_TOKENS),
        norm_eps=0.0,
        layer_types=(FULL_ATTENTION if recurrent is None else LINEAR_ATTENTION,) * layers,
        layer_ropes=(),
        recurrent=recurrent,
        eos_token_ids=union_of_ids(*ends, tokenizer_eos_ids(folder)),
        bos_token_id=begins[0] if begins else None,
        quantization=parse_foreign_quantization(fields),
        option_defaults=option_defaults(generation),
        stored_dtype=fields.text("dtype") or fields.text("torch_dtype"),
    )


def _recurrent(name: str, fields: Fields, hidden_size: int) -> RecurrentGeometry | None:
    """The state of a layer where none attends to keys and values; as mlx-lm keeps it, matrix and newest inputs."""
    if name in _RWKV:
        size = fields.count("head_dim", 64)
        return _state(hidden_size // size, rows=size, columns=size, inputs=3)
    if name not in _MAMBA | _MAMBA2:
        return None
    inputs = _count(fields, ("conv_kernel", "d_conv"), 4)
    columns = _count(fields, ("state_size", "d_state"), 128)
    if name in _MAMBA:
        return _state(1, rows=_count(fields, ("intermediate_size", "d_inner")), columns=columns, inputs=inputs)
    heads, groups = fields.count("num_heads"), fields.count("n_groups", 1)
    return _state(heads, rows=fields.count("head_dim"), columns=columns, inputs=inputs, groups=groups)


def _state(heads: int, *, rows: int, columns: int, inputs: int, groups: int = 0) -> RecurrentGeometry:
    return RecurrentGeometry(
        key_heads=groups, value_heads=heads, key_dim=columns, value_dim=rows, convolution_tokens=inputs
    )


def _latent(name: str, fields: Fields, heads: int) -> tuple[int, int]:
    """Heads and their size that stand for what a token leaves in a layer of latent attention, keys and values alike."""
    rotated = fields.count("qk_rope_head_dim", 64)
    if name in _UNPACKS_LATENTS:
        return heads, rotated + fields.count("qk_nope_head_dim", 128)
    kept = fields.count("kv_lora_rank") + rotated
    if "index_head_dim" in fields:
        kept += 2 * fields.count("index_head_dim")
    return (2 if name in _TWO_CACHES else 1), (kept + 1) // 2


def _require_architecture(name: str) -> None:
    known = ", ".join((*FAMILIES, *ALIASES))
    spec = find_spec(PACKAGE)
    if spec is None:
        raise UnsupportedArtifactError(
            CONFIG_FILE,
            f"model_type {name!r} is not supported; supported: {known}; `{INSTALL}`, in the checkout, adds what mlx-lm"
            " knows",
        )
    modules = [Path(place, "models", f"{name}.py") for place in spec.submodule_search_locations or ()]
    if not _NAME.fullmatch(name) or not (name in RENAMED or any(map(_is_architecture, modules))):
        raise UnsupportedArtifactError(
            CONFIG_FILE, f"model_type {name!r} is not supported, nor is it known to mlx-lm; supported: {known}"
        )


def _is_architecture(module: Path) -> bool:
    """Whether `module` has the two classes that mlx-lm builds a model of; others only help those that have."""
    try:
        return set(_WORD.findall(module.read_text())) >= _CLASSES
    except (OSError, UnicodeDecodeError):
        return False


def _count(fields: Fields, names: tuple[str, ...], default: int | None = None, **bounds: int) -> int:
    """The first of `names` that is stated, else `default`, else the refusal for the first.

    Where each layer has a number of its own, the largest stands for all.
    """
    stated = next((name for name in names if name in fields), names[0])
    if isinstance(fields.raw(stated), list) and (numbers := fields.numbers(stated)):
        return Fields(fields.file, {stated: int(max(numbers))}).count(stated, **bounds)
    return fields.count(stated, default, **bounds)
