"""The tokenizer of the tales' model: byte-level pairs learned from the tales, around the ids that the method reserves.

Id 1 ends an answer; so does 106, whatever the configuration says, so that no piece of text may have it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCAB_SIZE: Final = 640
CONTROL: Final = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<turn|>": 106}
PAD, END, BEGIN = CONTROL["<pad>"], CONTROL["<eos>"], CONTROL["<bos>"]


def learn_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` ids at most, with every byte among them."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(CONTROL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    model = json.loads(learned.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    free = (id_ for id_ in range(VOCAB_SIZE) if id_ not in CONTROL.values())
    ids = {piece: next(free) for piece in pieces} | CONTROL
    tokenizer = Tokenizer(models.BPE(ids, [tuple(pair) for pair in model["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BEGIN)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what a model's folder holds for text; of a conversation, the last message begins the tale."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{{ bos_token }}{{ messages[-1]['content'] }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
