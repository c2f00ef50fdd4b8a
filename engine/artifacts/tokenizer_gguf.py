"""The tokenizer that a GGUF file holds in its metadata, built as the same pipeline that a `tokenizer.json` gives.

Two models are read: "gpt2" (byte-level BPE with stated merges) and "llama" (sentencepiece BPE, whose merges follow
from the scores). How text is cut before BPE is known per `tokenizer.ggml.pre`; an unknown kind is refused.
Source: the GGUF specification, and the published tokenizers of the model families named below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline

from engine.artifacts.detokenizer import ByteLevelRule, PieceRule
from engine.artifacts.fields import Fields
from engine.artifacts.tokenizer import Tokenizer
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.detokenizer import DecodingRule

_KEY: Final = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE_MARK: Final = "\u2581"
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How text is cut before BPE. `words` is a pattern, or None for that of GPT-2."""

    words: str | None = None
    single_digits: bool = False
    composed: bool = False
    whole_words_first: bool = False
    bos: bool = False


_GPT2: Final = _Cut()
_SINGLE_DIGITS: Final = _Cut(single_digits=True)
_LLAMA3: Final = _Cut(words=_WORDS.replace("DIGITS", "1,3"), whole_words_first=True, bos=True)
_CUTS: Final[Mapping[str, _Cut]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _Cut(words=_WORDS.replace("{DIGITS}", ""), composed=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """Tokens by id, with their types, and the ids that the metadata names."""

    file: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: Mapping[str, int]
    bos: int | None
    ends: tuple[int, ...]

    def of_type(self, *types: int) -> list[int]:
        return [id_ for id_, type_ in enumerate(self.types) if type_ in types]


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, file: str, model_vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer from `metadata` of the GGUF file named `file`; `model_vocab_size` is as `Tokenizer` has it.

    Raises:
        MissingArtifactError: a key is absent; names it.
        CorruptArtifactError: values contradict each other.
        UnsupportedArtifactError: a tokenizer model or a way of cutting text that is not known here; names it.
    """
    fields = Fields(file, metadata)
    kind = fields.text(f"{_KEY}model")
    if not kind:
        raise MissingArtifactError(file, f"has no {_KEY}model, so it holds no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedArtifactError(file, f"{_KEY}model {kind!r} is not supported")
    vocabulary = _vocabulary(fields)
    pipeline, rule, bos = (_byte_level if kind == "gpt2" else _sentencepiece)(fields, vocabulary)
    pipeline.add_tokens(_added_tokens(vocabulary))
    _add_ends(pipeline, fields, vocabulary, bos=bos)
    return Tokenizer(
        pipeline,
        rule,
        vocab_size=len(vocabulary.tokens),
        model_vocab_size=model_vocab_size,
        bos_token_id=vocabulary.bos,
        eos_token_ids=vocabulary.ends,
    )


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens = _texts(fields, "tokens")
    types = fields.raw(f"{_KEY}token_type")
    if types is None:
        types = (_NORMAL,) * len(tokens)
    if not isinstance(types, list | tuple) or len(types) != len(tokens):
        raise CorruptArtifactError(fields.file, f"{_KEY}token_type must hold {len(tokens)} numbers, one per token")
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(id_ for id_, token in enumerate(tokens) if ids[token] != id_)
        raise CorruptArtifactError(fields.file, f"{_KEY}tokens holds the token of id {twice} twice")
    named = {name: _named_id(fields, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    ends = dict.fromkeys(id_ for name, id_ in named.items() if name != "bos" and id_ is not None)
    return _Vocabulary(file=fields.file, tokens=tokens, types=tuple(types), ids=ids, bos=named["bos"], ends=tuple(ends))


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    found = fields.texts(f"{_KEY}{name}")
    if not found:
        raise MissingArtifactError(fields.file, f"has no {_KEY}{name}")
    return found


def _named_id(fields: Fields, name: str, count: int) -> int | None:
    found = fields.token_ids(f"{_KEY}{name}")
    if len(found) > 1 or any(id_ >= count for id_ in found):
        raise fields.bad(f"{_KEY}{name}", f"must be one of {count} token ids")
    return found[0] if found else None


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> tuple[Pipeline, DecodingRule, bool]:
    pre = fields.text(f"{_KEY}pre")
    if not pre:
        raise MissingArtifactError(fields.file, f"has no {_KEY}pre, so it is unknown how text is cut")
    cut = _CUTS.get(pre)
    if cut is None:
        raise UnsupportedArtifactError(fields.file, f"{_KEY}pre {pre!r} is not supported")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(fields, "merges"))]
    pipeline = Pipeline(_bpe(vocabulary, pairs, ignore_merges=cut.whole_words_first))
    if cut.composed:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(_steps(cut))
    pipeline.decoder = decoders.ByteLevel()
    return pipeline, ByteLevelRule(), cut.bos


def _steps(cut: _Cut) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.words is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.words), behavior="isolated"))
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.words is None)]


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary) -> tuple[Pipeline, DecodingRule, bool]:
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if fields.raw(f"{_KEY}{name}"):
            raise UnsupportedArtifactError(fields.file, f"{_KEY}{name} is not supported")
    space_prefix = fields.flag(f"{_KEY}add_space_prefix", default=True)
    if space_prefix and any(_SPACE_MARK in vocabulary.tokens[id_] for id_ in vocabulary.of_type(_USER_DEFINED)):
        raise UnsupportedArtifactError(fields.file, "user-defined tokens with spaces are not supported")
    scores = fields.numbers(f"{_KEY}scores")
    if len(scores) != len(vocabulary.tokens):
        raise MissingArtifactError(fields.file, f"has {len(scores)} {_KEY}scores for {len(vocabulary.tokens)} tokens")
    unknown = next((vocabulary.tokens[id_] for id_ in vocabulary.of_type(_UNKNOWN)), None)
    pairs = _merges_by_score(vocabulary, scores)
    pipeline = Pipeline(_bpe(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefix = [normalizers.Prepend(_SPACE_MARK)] if space_prefix else []
    pipeline.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE_MARK)])
    rule = PieceRule(
        replacements=((_SPACE_MARK, " "),),
        byte_fallback=True,
        stripped=b" " if space_prefix else b"",
        stripped_count=int(space_prefix),
    )
    return pipeline, rule, True


def _merges_by_score(vocabulary: _Vocabulary, scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, best score of the result first: the order sentencepiece joins in."""
    pieces = {vocabulary.tokens[id_]: id_ for id_ in vocabulary.of_type(_NORMAL)}
    found = []
    for piece, id_ in pieces.items():
        for middle in range(1, len(piece)):
            left, right = pieces.get(piece[:middle]), pieces.get(piece[middle:])
            if left is not None and right is not None:
                found.append((-scores[id_], left, right))
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(found)]


def _bpe(vocabulary: _Vocabulary, pairs: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(dict(vocabulary.ids), pairs, **options)
    except Exception:  # the library raises nothing narrower
        raise CorruptArtifactError(
            vocabulary.file, f"{_KEY}merges names a token that {_KEY}tokens lacks, or is not made of pairs"
        ) from None


def _added_tokens(vocabulary: _Vocabulary) -> list[AddedToken]:
    """Tokens that are found in text before BPE: control tokens, and what the model's makers defined whole.

    A control token is found exactly as it is written; a defined one with a space mark where the text has a space.
    """
    control = {*vocabulary.of_type(_CONTROL, _UNKNOWN), *vocabulary.ends}
    control |= set() if vocabulary.bos is None else {vocabulary.bos}
    return [
        AddedToken(
            vocabulary.tokens[id_],
            special=id_ in control,
            normalized=id_ not in control and _SPACE_MARK in vocabulary.tokens[id_],
        )
        for id_ in sorted({*control, *vocabulary.of_type(_USER_DEFINED)})
        if vocabulary.tokens[id_]
    ]


def _add_ends(pipeline: Pipeline, fields: Fields, vocabulary: _Vocabulary, *, bos: bool) -> None:
    """Put BOS before and EOS after a text, where the file (or else its family) asks for it."""
    eos = _named_id(fields, "eos_token_id", len(vocabulary.tokens))
    before = vocabulary.bos if fields.flag(f"{_KEY}add_bos_token", default=bos) else None
    after = eos if fields.flag(f"{_KEY}add_eos_token", default=False) else None
    named = [(vocabulary.tokens[id_], id_) for id_ in (before, after) if id_ is not None]
    if named:
        single = [vocabulary.tokens[id_] if id_ is not None else "" for id_ in (before, after)]
        pipeline.post_processor = processors.TemplateProcessing(
            single=[part for part in (single[0], "$A", single[1]) if part], special_tokens=sorted(set(named))
        )
