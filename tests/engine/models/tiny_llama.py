"""Tiny random llama models, written to disk as a user's would be, beside the mlx-lm model they came from."""

import json
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import WeightStore
from engine.contracts.composition import Composition
from engine.generation.bindings.autoregressive import bind_mlx_autoregressive_graph
from engine.models.reading import WeightReader
from engine.models.registry import build_graph
from engine.runtime.policy import LayoutPolicy

VOCAB = 97
CONTEXT = 128

PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Oracle:
    """The same weights in mlx-lm."""

    model: llama.Model

    def logits(self, prompt: list[int]) -> mx.array:
        """Logits [L, V]: all but the last token in one forward, then the last one alone."""
        cache = make_prompt_cache(self.model)
        parts = [self.model(mx.array([part]), cache)[0] for part in (prompt[:-1], prompt[-1:]) if part]
        return mx.concatenate(parts, axis=0)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Greedy ids of mlx-lm's own loop shape: prompt but one, then token by token."""
        cache = make_prompt_cache(self.model)
        if prompt[:-1]:
            mx.eval(self.model(mx.array([prompt[:-1]]), cache))
        token, ids = prompt[-1], []
        for _ in range(count):
            token = mx.argmax(self.model(mx.array([[token]]), cache)[0, -1]).item()
            ids.append(token)
        return ids


def write(folder, *, seed=7, dtype=mx.float32, scale=1.0, **changes) -> Oracle:
    """Write a seeded model into `folder`; `scale` sharpens its logits."""
    config = PLAIN | changes
    arguments = {name: value for name, value in config.items() if name != "eos_token_id"}
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(arguments))
    model.set_dtype(dtype)
    if scale != 1.0:
        model.model.norm.weight = model.model.norm.weight * scale
    mx.eval(model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return Oracle(model)


def bind(folder, *, pretranspose=False, dequantize=True, dtype="float32", **composition):
    """Load `folder` through the product's own reading, and bind it."""
    layout = LayoutPolicy(
        compute_dtype=dtype, dequantize=dequantize, pretranspose_linear=pretranspose, prefill_step_tokens=32
    )
    artifact = open_artifact(folder)
    composition = Composition(**({"prefill_chunk_tokens": 32} | composition))
    graph = build_graph(artifact.config, WeightReader(WeightStore(artifact), layout), composition)
    return bind_mlx_autoregressive_graph(graph)


def random_prompt(seed: int, length: int) -> list[int]:
    """Seeded ids."""
    return mx.random.randint(0, VOCAB, (length,), key=mx.random.key(seed)).tolist()
