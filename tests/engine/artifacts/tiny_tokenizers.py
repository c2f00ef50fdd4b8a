"""Small tokenizers, built in code: byte-level BPE and sentencepiece BPE, as pipelines, folders and GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline

from engine.artifacts.detokenizer import byte_alphabet
from engine.artifacts.tokenizer import Tokenizer
from engine.artifacts.tokenizer_files import open_tokenizer
from engine.artifacts.tokenizer_gguf import tokenizer_from_gguf

FILE = "tiny.gguf"
CONTROLS = ("<|end|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog, 12 times 123 is 1476 and 12123",
    "red green blue black leading text, the capital of France is Paris",
    "system user assistant content messages: don't we'll I'm",
    "žluťoučký kůň, příliš; 你好世界 \u2581 emoji 👩🏽\u200d🚀 e\u0301",
)
# fmt: off
SPM_PIECES = [
    "\u2581", "a", "b", "c", "l", "e", "d", "i", "n", "g", "x", ".", "\u2581a", "ab", "bc", "abc", "aa", "aaa",
    "\u2581\u2581", "in", "ing", "le", "lead", "leading", "\u2581leading", "\u2581x",
]
# fmt: on


def byte_level_pipeline(*, vocab_size: int = 400, controls: tuple[str, ...] = CONTROLS) -> Pipeline:
    """Byte-level BPE with GPT-2 cuts; the control tokens have the first ids."""
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(byte_alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in controls],
        show_progress=False,
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    return pipeline


def byte_level_metadata(pipeline: Pipeline, **changes: Any) -> dict[str, Any]:
    """What a GGUF file would hold for `pipeline`; a change to None removes the key."""
    model = json.loads(pipeline.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    special = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _with_prefix(metadata | changes)


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A sentencepiece vocabulary with all byte tokens; better pieces come first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    bytes_at = range(3, 259)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *(6 for _ in bytes_at), *(1 for _ in SPM_PIECES)],
        "scores": [0.0, 0.0, 0.0, *(0.0 for _ in bytes_at), *(-float(at) for at in range(len(SPM_PIECES)))],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _with_prefix(metadata | changes)


def byte_level() -> Tokenizer:
    """The byte-level tokenizer, from metadata."""
    return tokenizer_from_gguf(byte_level_metadata(byte_level_pipeline()), file=FILE)


def spm() -> Tokenizer:
    """The sentencepiece tokenizer, from metadata."""
    return tokenizer_from_gguf(spm_metadata(), file=FILE)


def spm_decoder() -> decoders.Decoder:
    """The chain that sentencepiece conversions carry."""
    return decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def word_pipeline(pieces: list[str], *, prepend: str) -> Pipeline:
    """Sentencepiece style with BOS and turn marks; `prepend` is "always" (a normalizer) or "first" (Metaspace)."""
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys([*CONTROLS, *pieces]))}
    pipeline = Pipeline(models.BPE(vocab, []))
    if prepend == "always":
        pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    pipeline.decoder = spm_decoder()
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    return pipeline


def folder_of(path: Path, pipeline: Pipeline, **config: Any) -> Path:
    """Write `pipeline` and a tokenizer configuration into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    pipeline.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def tokenizer_of(path: Path, pipeline: Pipeline, **config: Any) -> Tokenizer:
    """The tokenizer of `pipeline`, by way of a folder."""
    return open_tokenizer(folder_of(path, pipeline, **config))


def _with_prefix(metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
