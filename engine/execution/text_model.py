"""The text half of a model: its tokenizer and its chat template. Imported while the engine thread reads tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.artifacts.chat_template import chat_template_from_gguf, encode_chat, open_chat_template
from engine.artifacts.tokenizer_files import open_tokenizer
from engine.artifacts.tokenizer_gguf import tokenizer_from_gguf

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact
    from engine.artifacts.chat_template import ChatTemplate
    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Everything of a model that deals in text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def encode_chat(self, chat: ChatPrompt) -> tuple[str, list[int]]:
        """The text and the ids that a conversation becomes.

        Raises:
            ChatTemplateError: the model has no template, or its template refuses the conversation.
        """
        return encode_chat(self.template, self.tokenizer, chat)


def open_text_model(artifact: Artifact) -> TextModel:
    """Open what `artifact` holds for text.

    Raises:
        EngineError: it cannot be used.
    """
    vocab_size = artifact.config.vocab_size
    if artifact.kind == "gguf":
        tokenizer = tokenizer_from_gguf(artifact.metadata, file=artifact.path.name, model_vocab_size=vocab_size)
        template = chat_template_from_gguf(artifact.metadata, tokenizer)
    else:
        tokenizer = open_tokenizer(artifact.path, model_vocab_size=vocab_size)
        template = open_chat_template(artifact.path, tokenizer)
    return TextModel(tokenizer=tokenizer, template=template)
