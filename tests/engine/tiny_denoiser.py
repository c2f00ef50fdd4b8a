"""A complete tiny block-diffusion model folder: random weights, the byte-level tokenizer, a chat template."""

import json

from tests.engine.models import tiny_diffusion
from tests.engine.tiny_model import CHAT_TEMPLATE, VOCAB, byte_tokenizer

SCALE = 6.0
"""Sharpens the scores of random weights: see `tests.engine.generation.test_denoising_parity`."""


def write(folder, *, chat_template=CHAT_TEMPLATE, quantized=False, **changes):
    """Write the folder; returns the mlx-vlm model with the same weights."""
    sizes = {"vocab_size": VOCAB} | (tiny_diffusion.WIDE if quantized else {})
    model = tiny_diffusion.build(scale=SCALE, **(sizes | changes))
    extra = {"quantization": tiny_diffusion.quantize(model)} if quantized else {}
    tiny_diffusion.save(folder, model, eos_token_id=[50], **extra)
    write_text(folder, byte_tokenizer(), chat_template)
    return model


def write_text(folder, tokenizer, chat_template):
    """Write the text half."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
