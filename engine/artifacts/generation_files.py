"""What the files beside a configuration say about generation: default options, and tokens that end a completion.

Fields of `generation_config.json` that would change the output and that we do not apply are logged by name.
Reads `generation_config.json` and, for the name and id of the end token alone, the tokenizer's files.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from engine.artifacts.consistency import listed
from engine.artifacts.fields import LARGEST_COUNT, TOKENIZER_LIMIT_BYTES, Fields, read_object, shown_text
from engine.artifacts.model_files import is_named
from engine.contracts.options import OptionDefaults

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"

_LARGEST_FLOAT32: Final = 3.4028234663852886e38
_DEFAULT_TEMPERATURE: Final = 1.0
_DEFAULT_TOP_K: Final = 50
_APPLIED: Final = frozenset(
    {"do_sample", "eos_token_id", "max_new_tokens", "min_p", "temperature", "top_k", "top_p"},
)
# They say how to compute, what to return, or how to search with several beams: not what one sequence holds.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "_commit_hash",
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "early_stopping",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
    }
)
# The number that means "off", where it is not 0.
_NEUTRAL: Final[Mapping[str, int]] = {
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "typical_p": 1,
}


def option_defaults(generation: Fields) -> OptionDefaults:
    """The model's own options; sampling ones count unless `do_sample` is false, and are checked even then.

    `do_sample: true` asks for sampling as Hugging Face documents it: with temperature 1 and the 50 most likely tokens
    where the file does not state `temperature` and `top_k`. Without `do_sample`, only what is stated counts.

    Raises:
        CorruptArtifactError: a value is not finite or out of its range; the file and the field are named.
    """
    max_tokens = generation.count("max_new_tokens") if "max_new_tokens" in generation else None
    temperature = _within(generation, "temperature", _LARGEST_FLOAT32)
    top_p, min_p = _within(generation, "top_p", 1.0), _within(generation, "min_p", 1.0)
    top_k = _top_k(generation)
    samples = generation.optional_flag("do_sample")
    if samples is False:
        return OptionDefaults(max_tokens=max_tokens)
    if samples:
        temperature = _DEFAULT_TEMPERATURE if temperature is None else temperature
        top_k = _DEFAULT_TOP_K if top_k is None else top_k
    return OptionDefaults(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


def log_unapplied(generation: Fields) -> None:
    """Name, in one line and without values, the fields that would change the output and that we do not apply."""
    names = [name for name in generation if _is_unapplied(name, generation.raw(name))]
    if names:
        _log.info("%s: not applied: %s", generation.file, listed([_shown(name) for name in names]))


def tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the end token that `tokenizer_config.json` names; empty when no file knows its id."""
    if not is_named(folder / TOKENIZER_CONFIG_FILE):
        return ()
    config = Fields(
        TOKENIZER_CONFIG_FILE, read_object(folder / TOKENIZER_CONFIG_FILE, limit_bytes=TOKENIZER_LIMIT_BYTES)
    )
    require_tokens(config, ["eos_token"])
    name = _token_text(config.raw("eos_token"))
    if not name:
        return ()
    decoder = config.fields("added_tokens_decoder")
    known = (
        []
        if decoder is None
        else [int(key) for key in decoder if key.isdecimal() and _token_text(decoder.raw(key)) == name]
    )
    return tuple(known) or _ids_in_tokenizer(folder, name)


def require_tokens(config: Fields, names: Iterable[str]) -> None:
    """Raise `CorruptArtifactError` when a special token is neither text nor an object whose `content` is text."""
    for name in names:
        value = config.raw(name)
        if value is not None and not isinstance(value.get("content") if isinstance(value, dict) else value, str):
            raise config.bad(name, "must be text, or an object with the text as its content")


def _ids_in_tokenizer(folder: Path, name: str) -> tuple[int, ...]:
    """Look `name` up among the added tokens of `tokenizer.json`, then in its vocabulary."""
    if not is_named(folder / TOKENIZER_FILE):
        return ()
    tokenizer = Fields(TOKENIZER_FILE, read_object(folder / TOKENIZER_FILE, limit_bytes=TOKENIZER_LIMIT_BYTES))
    added = tokenizer.raw("added_tokens")
    for token in added if isinstance(added, list) else []:
        if _token_text(token) == name:
            return Fields(TOKENIZER_FILE, token).token_ids("id")
    model = tokenizer.fields("model")
    vocabulary = model.raw("vocab") if model is not None else None
    return Fields(TOKENIZER_FILE, vocabulary).token_ids(name) if isinstance(vocabulary, dict) else ()


def _token_text(token: object) -> str:
    """The text of a token that is written either plainly or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _is_unapplied(name: str, value: object) -> bool:
    if name in _APPLIED or name in _WITHOUT_EFFECT or value is None or value is False or value in ([], {}, ""):
        return False
    return name.endswith("_token_id") or value != _NEUTRAL.get(name, 0)


def _shown(name: str) -> str:
    """A field's name, cut and escaped so that a file cannot write lines of its own into the log."""
    shown = shown_text(name)
    return name if name.isidentifier() and shown == repr(name) else shown


def _within(generation: Fields, name: str, high: float) -> float | None:
    value = generation.optional_number(name)
    if value is not None and not 0 <= value <= high:
        raise generation.bad(name, f"must be from 0 to {high:g}")
    return value


def _top_k(generation: Fields) -> int | None:
    """A whole number from 0 (off)."""
    value = generation.optional_number("top_k")
    if value is not None and not (0 <= value <= LARGEST_COUNT and value.is_integer()):
        raise generation.bad("top_k", f"must be a whole number from 0 to {LARGEST_COUNT}")
    return None if value is None else int(value)
