"""The text half of a scripted model: one token for each byte of a prompt, and one for each piece that a script says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.artifacts.chat_template import ChatTemplate
from engine.artifacts.detokenizer import ByteLevelRule, byte_alphabet
from engine.artifacts.tokenizer import Tokenizer
from engine.contracts.prompt import ChatPrompt, TextPart, TextPrompt
from engine.execution.scripted.script import END_ID, FIRST_PIECE_ID
from engine.execution.text_model import TextModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.contracts.prompt import Prompt
    from engine.execution.scripted.script import Script

END_TEXT: Final = "<|end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def scripted_text_model(script: Script) -> TextModel:
    """A tokenizer that knows the bytes, the end and the pieces of `script`, and a template of plain lines."""
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = {character: byte for byte, character in alphabet.items()}
    vocabulary[END_TEXT] = END_ID
    for token, piece in enumerate(script.pieces, start=FIRST_PIECE_ID):
        vocabulary["".join(map(alphabet.__getitem__, piece))] = token
    pipeline = Pipeline(BPE(vocab=vocabulary, merges=[]))
    pipeline.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.add_special_tokens([END_TEXT])
    tokenizer = Tokenizer(pipeline, ByteLevelRule(), vocab_size=script.vocab_size, eos_token_ids=(END_ID,))
    return TextModel(tokenizer=tokenizer, template=ChatTemplate({"default": CHAT_TEMPLATE}))


def bytes_of(ids: Iterable[int]) -> bytes:
    """What the ids of a prompt spell, as far as they are bytes."""
    return bytes(token for token in ids if token < END_ID)


def bytes_of_prompt(prompt: Prompt) -> bytes:
    """What a prompt spells before it is tokenized."""
    match prompt:
        case TextPrompt():
            return prompt.text.encode("utf-8", "replace")
        case ChatPrompt():
            parts = (part.text for turn in prompt.messages for part in turn.content if isinstance(part, TextPart))
            return "\n".join(parts).encode("utf-8", "replace")
        case _:
            return bytes_of(prompt.ids)
