"""Tiny random models of architectures that have no graph here, saved as mlx-lm saves them."""

import importlib
import json

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from tests.engine import tiny_model

VOCAB = tiny_model.VOCAB
CONTEXT = 128

COHERE2 = {
    "model_type": "cohere2",
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "max_position_embeddings": CONTEXT,
    "logit_scale": 2.0,
}
STABLELM = {
    "model_type": "stablelm",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "use_qkv_bias": True,
    "partial_rotary_factor": 0.5,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT,
}
MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 8,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": "auto",
    "max_position_embeddings": CONTEXT,
}
INTERNLM2 = {
    "model_type": "internlm2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
ARCHITECTURES = {"cohere2": COHERE2, "stablelm": STABLELM, "mamba2": MAMBA2, "internlm2": INTERNLM2}


def write(folder, config, *, quantization=None, dtype=mx.float32, seed=5, scale=4.0):
    """Write a seeded model with a tokenizer; returns the mlx-lm model that holds the same weights."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    model.apply(lambda array: array * scale if array.ndim > 1 else array)  # so that greedy ids are clear and varied
    if quantization:
        nn.quantize(model, **quantization)
    mx.eval(model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    fields = (
        config | {"eos_token_id": tiny_model.END_OF_TEXT} | ({"quantization": quantization} if quantization else {})
    )
    (folder / "config.json").write_text(json.dumps(fields))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tiny_model.byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model.eval()


def greedy(model, prompt, count):
    """Ids of mlx-lm's own loop."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [token for token, _ in steps]
