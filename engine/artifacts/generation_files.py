"""What the files beside a configuration say about generation: default options, and tokens that end a completion.

Reads `generation_config.json` and, for the name and id of the end token alone, the tokenizer's files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.artifacts.fields import TOKENIZER_LIMIT_BYTES, Fields, read_object
from engine.contracts.options import OptionDefaults

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"


def option_defaults(generation: Fields) -> OptionDefaults:
    """The model's own options; sampling ones count unless `do_sample` is false."""
    max_tokens = generation.count("max_new_tokens") if "max_new_tokens" in generation else None
    if generation.optional_flag("do_sample") is False:
        return OptionDefaults(max_tokens=max_tokens)
    return OptionDefaults(
        max_tokens=max_tokens,
        temperature=_within(generation, "temperature", None),
        top_p=_within(generation, "top_p", 1.0),
        top_k=_top_k(generation),
        min_p=_within(generation, "min_p", 1.0),
    )


def tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the end token that `tokenizer_config.json` names; empty when no file knows its id."""
    if not (folder / TOKENIZER_CONFIG_FILE).exists():
        return ()
    config = Fields(
        TOKENIZER_CONFIG_FILE, read_object(folder / TOKENIZER_CONFIG_FILE, limit_bytes=TOKENIZER_LIMIT_BYTES)
    )
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


def _ids_in_tokenizer(folder: Path, name: str) -> tuple[int, ...]:
    """Look `name` up among the added tokens of `tokenizer.json`, then in its vocabulary."""
    if not (folder / TOKENIZER_FILE).exists():
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


def _within(generation: Fields, name: str, high: float | None) -> float | None:
    value = generation.optional_number(name)
    if value is not None and (value < 0 or (high is not None and value > high)):
        raise generation.bad(name, "must be at least 0" if high is None else f"must be from 0 to {high:g}")
    return value


def _top_k(generation: Fields) -> int | None:
    """A whole number from 0 (off)."""
    value = generation.optional_number("top_k")
    if value is not None and (value < 0 or not value.is_integer()):
        raise generation.bad("top_k", "must be a whole number from 0")
    return None if value is None else int(value)
