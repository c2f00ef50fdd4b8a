"""A complete tiny block-diffusion model folder with a vision tower, whose template and tokenizer know images."""

from tokenizers import AddedToken

from tests.engine import tiny_denoiser
from tests.engine.models import tiny_vision
from tests.engine.tiny_model import VOCAB, byte_tokenizer

BEGIN, IMAGE, END = VOCAB, VOCAB + 1, VOCAB + 2
IDS = {"boi_token_id": BEGIN, "image_token_id": IMAGE, "eoi_token_id": END}
TOKENS = ("<|image>", "<|image|>", "<image|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLIND_TEMPLATE = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"


def write(folder, *, chat_template=CHAT_TEMPLATE, **changes):
    """Write the folder; returns the mlx-vlm model with the same weights."""
    model = tiny_vision.build(
        {"standardize": True}, ids=IDS, scale=tiny_denoiser.SCALE, vocab_size=VOCAB + len(TOKENS), **changes
    )
    projection = model.model.encoder.embed_vision.embedding_projection
    projection.weight = projection.weight * LOUDNESS
    tiny_vision.save(folder, model, eos_token_id=[50])
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    tiny_denoiser.write_text(folder, tokenizer, chat_template)
    return model


LOUDNESS = 20.0
"""Makes what is seen as loud as what is read: else random weights say the same of every image."""
