"""A complete tiny model folder: random llama weights, a byte-level tokenizer and a chat template, all built here."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.models import tiny_llama

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(CONTROL_TOKENS)
END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, in the order of the byte-level alphabet, then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    return tokenizer


def write(folder, *, eos=(END_OF_TEXT,), chat_template=CHAT_TEMPLATE, **changes) -> tiny_llama.Oracle:
    """Write the folder; returns the mlx-lm model with the same weights.

    An untied head and a scale of 4 make greedy ids clear and varied: a tied random model repeats its last token.
    """
    values = {"vocab_size": VOCAB, "eos_token_id": list(eos), "scale": 4.0, "tie_word_embeddings": False}
    oracle = tiny_llama.write(folder, **(values | changes))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return oracle
