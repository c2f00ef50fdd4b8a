"""The text half of a model: its tokenizer and its chat template. Imported while the engine thread reads tensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.artifacts.chat_template import chat_template_from_gguf, encode_chat, open_chat_template
from engine.artifacts.tokenizer_files import open_tokenizer
from engine.artifacts.tokenizer_gguf import tokenizer_from_gguf

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact
    from engine.artifacts.chat_template import ChatTemplate
    from engine.artifacts.image_prompt import ImagePlace, ImageReader
    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.prompt import ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Everything of a model that deals in text, and in where images stand in it; `images` None: it takes none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    images: ImageReader | None = None

    def encode_chat(self, chat: ChatPrompt) -> tuple[str, list[int]]:
        """The text and the ids that a conversation becomes. Raises what `place_chat` does."""
        text, ids, _ = self.place_chat(chat)
        return text, ids

    def place_chat(self, chat: ChatPrompt) -> tuple[str, list[int], tuple[ImagePlace, ...]]:
        """The text and the ids that a conversation becomes, and where its images stand; their pixels are not read.

        Raises:
            ChatTemplateError: the model has no template, or its template refuses the conversation or its images.
            InvalidRequestError: an image, or another part of the conversation, is not usable.
            UnsupportedOptionError: it holds an image, and the model takes none.
        """
        reader = self.images
        images = [] if reader is None else reader.open(chat)
        text, ids = encode_chat(self.template, self.tokenizer, chat, takes_images=reader is not None)
        return (text, ids, ()) if reader is None else (text, *reader.placed(ids, images))


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
    return TextModel(tokenizer=tokenizer, template=template, images=_image_reader(artifact))


def _image_reader(artifact: Artifact) -> ImageReader | None:
    """What reads images for a model that takes some; the library for them is imported for no other."""
    vision = artifact.config.vision
    if vision is None:
        return None
    image_prompt = importlib.import_module("engine.artifacts.image_prompt")
    importlib.import_module("engine.artifacts.image_decoding").keep_library_quiet()
    reader: ImageReader = image_prompt.ImageReader(geometry=vision.geometry, ids=vision.ids)
    return reader
