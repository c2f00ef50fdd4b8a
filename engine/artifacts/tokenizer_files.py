"""The tokenizer of a model folder: `tokenizer.json`, and what the files beside it say about its special tokens."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from engine.artifacts.detokenizer import classify_decoder
from engine.artifacts.fields import TOKENIZER_LIMIT_BYTES, Fields, read_object, shown_text
from engine.artifacts.generation_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, require_tokens
from engine.artifacts.model_files import is_named, naming_folder, read_file
from engine.artifacts.tokenizer import Tokenizer
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
_OTHER_FORMS: Final = ("tokenizer.model", "spiece.model", "vocab.json")
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def open_tokenizer(folder: Path, *, model_vocab_size: int | None = None) -> Tokenizer:
    """Read the tokenizer in `folder`; `model_vocab_size` is as `Tokenizer` has it.

    Raises:
        MissingArtifactError: there is no `tokenizer.json`.
        CorruptArtifactError: a file cannot be read for what it should be.
        UnsupportedArtifactError: the tokenizer joins its tokens in a way that we do not know.
    """
    with naming_folder(folder):
        pipeline = _read_pipeline(folder)
        decoder = pipeline.decoder
        rule = classify_decoder(None if decoder is None else json.loads(decoder.__getstate__()), file=TOKENIZER_FILE)
        special = _special_tokens(folder)
    bos, eos = (_id_of(pipeline, special, name) for name in ("bos_token", "eos_token"))
    _flag_controls(pipeline, special, always={bos, eos})
    return Tokenizer(
        pipeline,
        rule,
        vocab_size=max(pipeline.get_vocab().values(), default=-1) + 1,
        model_vocab_size=model_vocab_size,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
    )


def _read_pipeline(folder: Path) -> Pipeline:
    path = folder / TOKENIZER_FILE
    if not is_named(path):
        other = next((name for name in _OTHER_FORMS if (folder / name).is_file()), None)
        raise MissingArtifactError(
            TOKENIZER_FILE, "is not there" + (f"; {other} alone is not read, convert it first" if other else "")
        )
    raw = read_file(path, TOKENIZER_LIMIT_BYTES)
    try:
        return Pipeline.from_buffer(raw)
    except Exception:  # the library raises nothing narrower
        raise CorruptArtifactError(TOKENIZER_FILE, "is not a tokenizer that can be read") from None


def _special_tokens(folder: Path) -> dict[str, object]:
    """What the tokenizer configuration says, over what the special tokens map says."""
    found: dict[str, object] = {}
    for name in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
        if is_named(folder / name):
            document = read_object(folder / name, limit_bytes=TOKENIZER_LIMIT_BYTES)
            require_tokens(Fields(name, document), _NAMES)
            found |= {key: value for key, value in document.items() if value is not None}
    return found


def _flag_controls(pipeline: Pipeline, special: Mapping[str, object], *, always: set[int | None]) -> None:
    """Make every token that the files call special a control token; only BOS and EOS may be plain vocabulary so far."""
    added: Mapping[int, AddedToken] = pipeline.get_added_tokens_decoder()
    flagged = []
    for content in dict.fromkeys(_special_contents(special)):
        id_ = pipeline.token_to_id(content)
        token = None if id_ is None else added.get(id_)
        if id_ is not None and id_ in always and token is None:
            flagged.append(AddedToken(content, special=True, normalized=False))
        elif token is not None and not token.special:
            token.special = True
            flagged.append(token)
    if flagged:
        pipeline.add_special_tokens(flagged)


def _special_contents(special: Mapping[str, object]) -> Iterator[str]:
    for name in _NAMES:
        yield from _contents(special.get(name))
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = special.get(name)
        for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from _contents(entry)
    decoder = special.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and entry.get("special") is True:
            yield from _contents(entry)


def _contents(token: Any) -> Iterator[str]:
    """The text of a token that is written plainly or as an object with `content`; nothing for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str) and content:
        yield content


def _id_of(pipeline: Pipeline, special: Mapping[str, object], name: str) -> int | None:
    """The id of the special token that has the role `name`; one that nobody knows is logged, and plays no role."""
    content = next(_contents(special.get(name)), None)
    if content is None:
        return None
    id_: int | None = pipeline.token_to_id(content)
    if id_ is None:
        _log.warning("%s is %s, which is no token of %s: it has no effect", name, shown_text(content), TOKENIZER_FILE)
    return id_
